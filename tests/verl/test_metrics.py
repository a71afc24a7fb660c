"""What a reader of verl's log sees: exact totals and ratios after verl's own averaging."""

import logging

import pytest
import torch
from batches import actor_config, as_verl_averages, make_batch, rows_of
from hypothesis import given, settings
from test_loss import cut
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from llds.diagnosis.vocabulary import canonical_names
from llds.dynamics import SERIES, Measure, measure, read_series
from llds.engines.verl.metrics import SUMMED_RATIOS, exact_ratios, over_all_tokens
from llds.objective import llds_loss

#: Two training steps' worth of mini-batches.
SEEDS = (0, 1)


def report(parts, batches, **llds):
    """Return what each rank says in each optimizer step, ``parts[rank][micro-batch]`` being indices."""
    told = []
    for rank in parts:
        config = actor_config(mini_batch=8, ranks=len(parts), tokens=0, **llds)
        mine = []
        for batch in batches:
            config.global_batch_info["batch_num_tokens"] = int(batch["response_mask"].sum())
            mine.append([speak(rows_of(batch, index), config) for index in rank])
        told.append(mine)
    return told


def speak(batch, config):
    """Return what is ours; verl's own metrics want as many micro-batches on every rank, as verl makes them."""
    _, told = get_policy_loss_fn("llds")(**batch, config=config)
    return {name: value for name, value in told.items() if name.startswith("llds/")}


def whole(batch, **how):
    """Return the series and the objective's metrics of a whole mini-batch."""
    given_ = (batch["log_prob"], batch["old_log_prob"], batch["advantages"], batch["response_mask"])
    return read_series(measure(*given_, how=Measure(**how))), llds_loss(*given_, coef=0.2)


@settings(max_examples=30, deadline=None)
@given(cut())
def test_one_optimizer_step_is_exact_where_it_can_be(parts):
    batch = make_batch()
    logged = as_verl_averages(report(parts, [batch]))
    series, output = whole(batch)
    assert logged["llds/loss"] == pytest.approx(float(output.loss))
    micro_batches = sum(len(rank) for rank in parts)
    assert logged["llds/micro_batches"] == micro_batches
    ratios = exact_ratios({f"actor/{name}": value for name, value in logged.items()})
    for name, value in series.items():
        quotient = SERIES[name].quotient
        if value is None or name == "micro_batches":
            continue
        if not quotient.bottom or over_all_tokens(quotient) or len(parts) == 1:
            assert logged[f"llds/{name}"] == pytest.approx(value), name
        if name in SUMMED_RATIOS:
            assert ratios[name] == pytest.approx(value), name
    assert set(SUMMED_RATIOS) <= set(ratios)


@settings(max_examples=20, deadline=None)
@given(cut())
def test_sums_of_a_training_step_are_exact_means_and_their_quotients_exact_ratios(parts):
    batches = [make_batch(seed=seed) for seed in SEEDS]
    logged = as_verl_averages(report(parts, batches))
    outputs = [whole(batch)[1].metrics for batch in batches]
    steps = len(batches)
    assert logged["llds/tokens"] == pytest.approx(sum(int(one["tokens"]) for one in outputs) / steps)
    assert logged["llds/sum/penalty"] == pytest.approx(
        sum(float(one["penalty_sum"]) for one in outputs) / steps
    )
    together = sum(float(one["penalty_sum"]) for one in outputs) / sum(
        int(one["preserved_tokens"]) for one in outputs
    )
    assert exact_ratios(logged)["penalty"] == pytest.approx(together)


def test_a_rank_without_correct_responses_says_nothing_of_them():
    batch = make_batch()
    parts = [[[0, 2, 4, 5]], [[1, 3, 6, 7]]]
    batch["advantages"][7] = -1.0 * batch["response_mask"][7]
    told = report(parts, [batch])
    assert "llds/logprob_correct" in told[0][0][0]
    assert "llds/logprob_correct" not in told[1][0][0]
    series, _ = whole(batch)
    logged = as_verl_averages(told)
    assert exact_ratios(logged)["logprob_correct"] == pytest.approx(series["logprob_correct"])


def test_only_the_last_micro_batch_of_an_optimizer_step_speaks():
    (steps,) = report([[[0, 1, 2], [3, 4], [5, 6, 7]]], [make_batch(), make_batch()])
    speaks = [["llds/loss" in told for told in step] for step in steps]
    assert speaks == [[False, False, True], [False, False, True]]


def test_a_pass_without_gradients_does_not_count():
    batch = make_batch()
    config = actor_config(mini_batch=8, tokens=int(batch["response_mask"].sum()))
    loss = get_policy_loss_fn("llds")
    with torch.no_grad():
        assert "llds/loss" not in loss(**batch, config=config)[1]
    assert loss(**batch, config=config)[1]["llds/micro_batches"] == 1


def test_verl_that_says_nothing_of_the_batch_gets_every_micro_batch():
    batch = make_batch()
    _, told = get_policy_loss_fn("llds")(**rows_of(batch, [0, 1]), config=actor_config())
    assert told["llds/loss"] > 0


def test_no_name_is_one_that_verl_takes_the_extreme_of_and_the_diagnosis_knows_them():
    """verl takes the largest or smallest value of a metric with "max" or "min" in its name."""
    batch = make_batch()
    told = get_policy_loss_fn("llds")(**batch, config=actor_config())[1]
    ours = [name for name in told if name.startswith("llds/")]
    assert not [name for name in ours if "max" in name or "min" in name]
    known = canonical_names(f"actor/{name}" for name in ours)
    assert {"structural_zero", "llds_loss", "llds_coef", "displacement_correct", "gate_rate"} <= set(known)
    unknown = set(ours) - {key.removeprefix("actor/") for keys in known.values() for key in keys}
    assert {name for name in unknown if not name.startswith("llds/sum/")} == set()


# --- structural zero


RUN = {"train_batch_size": 4, "mini_batch_size": 2, "epochs": 1, "bypass": False}


def steps_of(config, count, moved_from=0):
    loss = get_policy_loss_fn(config.policy_loss.loss_mode)
    for step in range(count):
        batch = make_batch(seed=step)
        if step < moved_from:
            batch["log_prob"] = batch["old_log_prob"].clone()
        yield loss(**batch, config=config)[1]


def test_zero_by_schedule_is_told_at_once(caplog):
    run = {**RUN, "train_batch_size": 2}
    with caplog.at_level(logging.WARNING, logger="llds.engines.verl"):
        told = list(steps_of(actor_config(run=run), 3, moved_from=3))
    assert [one["llds/structural_zero"] for one in told] == [1.0, 1.0, 1.0]
    assert [one["llds/loss"] for one in told] == [0.0, 0.0, 0.0]
    assert len(caplog.records) == 1
    assert "STRUCTURAL ZERO. The penalty cannot act: each rollout gets one optimizer step" in caplog.text


def test_noise_in_a_structural_zero_is_called_noise(caplog):
    with caplog.at_level(logging.WARNING, logger="llds.engines.verl"):
        (told,) = steps_of(actor_config(run={**RUN, "train_batch_size": 2}), 1)
    assert told["llds/structural_zero"] == 1.0
    assert told["llds/noise_floor"] > 0
    assert "numerical noise" in caplog.text


def test_the_first_step_of_each_rollout_is_structural(caplog):
    told = list(steps_of(actor_config(run=RUN), 4))
    assert [one["llds/structural_zero"] for one in told] == [1.0, 0.0, 1.0, 0.0]
    assert [one["llds/updates_since_rollout"] for one in told] == [0.0, 1.0, 0.0, 1.0]
    assert caplog.text == ""


def test_without_a_known_schedule_it_is_measured_and_told_later(caplog):
    config = actor_config()
    assert [one["llds/structural_zero"] for one in steps_of(config, 7, 7)] == [1.0] * 7
    assert caplog.text == ""
    list(steps_of(config, 1, 1))
    assert "in the first 8 optimizer steps no log-prob differed" in caplog.text
    moved = list(steps_of(actor_config(), 9, moved_from=8))
    assert moved[-1]["llds/structural_zero"] == 0.0


def test_bypass_mode_is_live_in_the_first_step(caplog):
    (told,) = steps_of(actor_config(run={**RUN, "train_batch_size": 2, "bypass": True}), 1)
    assert told["llds/structural_zero"] == 0.0
    assert caplog.text == ""
