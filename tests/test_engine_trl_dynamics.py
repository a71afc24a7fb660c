"""What a TRL run shows of its dynamics: every series, whatever the cut of the batch, and the alarms."""

import json
import logging
import math

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

import trl_toy as toy
from llds.dynamics import SERIES, compare_first_searches, synthetic
from llds.engines.trl import LLDSGRPOConfig, LLDSGRPOTrainer, attach_llds
from llds.engines.trl.monitor import EVENTS_FILE, MONITOR_FILE
from llds.errors import LLDSError


def make(folder, rollout=None, **overrides):
    options = {"num_iterations": 4, "learning_rate": 0.02, "llds_coef": 1.0} | overrides
    return toy.trainer(LLDSGRPOTrainer, LLDSGRPOConfig(**toy.settings(folder, **options)), rollout=rollout)


def watched(trainer):
    """Train; return the step records, and what the observers saw."""
    records, arrays = [], []
    trainer.llds.step_hooks.append(records.append)
    trainer.llds.observers.append(lambda *seen: arrays.append(seen))
    trainer.train()
    return records, arrays


# --- series


def test_every_batch_series_is_logged_under_its_name(tmp_path):
    trainer = make(tmp_path, max_steps=2)
    trainer.train()
    logged = {name for entry in trainer.state.log_history for name in entry if name.startswith("llds/")}
    # Responses here have two actions at most, and no group is without signal.
    absent = {name for name, one in SERIES.items() if one.source == "batch" and one.key not in logged}
    assert all("later" in name or "neutral" in name or "round" in name for name in absent), absent
    assert {"llds/phase", "llds/coef", "llds/loss"} <= logged


def test_series_are_those_of_the_arrays(tmp_path):
    """Tool rounds, answer span, entropy and age, against sums by hand over what the observers saw."""
    records, arrays = watched(make(tmp_path, max_steps=2))
    new, old, advantages, mask, inputs = arrays[1]
    series = records[1].series
    assert series["updates_since_rollout"] == 1
    after = torch.zeros_like(mask)
    for row in range(mask.shape[0]):
        runs, before = -1, 0
        for column in range(mask.shape[1]):
            bit = int(mask[row, column])
            runs += bit and not before
            after[row, column] = runs if bit else -1
            before = bit
    for rounds in (0, 1):
        expected = -float(new[after == rounds].mean())
        assert series[f"nll_round_{rounds}"] == pytest.approx(expected, rel=1e-5)
    answer = inputs["llds_answer_mask"].bool() & mask.bool() & (advantages > 1e-3).unsqueeze(1)
    drop = float((old - new)[answer].mean())
    assert series["displacement_correct_answer"] == pytest.approx(drop, rel=1e-4)


def test_entropy_is_the_one_that_the_trainer_logs(tmp_path):
    trainer = make(tmp_path, max_steps=3)
    trainer.train()
    for entry in trainer.state.log_history[:3]:
        assert entry["llds/policy_entropy"] == pytest.approx(entry["entropy"], rel=1e-5)


def test_first_searches_are_compared_within_groups(tmp_path):
    records, arrays = watched(make(tmp_path, max_steps=1))
    inputs = arrays[0][4]
    codes = inputs["llds_first_search"].tolist()
    prompts = [tuple(row.tolist()) for row in inputs["prompt_ids"]]
    rollout = toy.Canned()
    found = []
    for prompt, ids in zip(prompts, inputs["completion_ids"].tolist(), strict=True):
        text = " ".join(toy.WORDS[token] for token in prompt)
        episodes = [rollout.episode(text, place) for place in range(toy.GENERATIONS)]
        found += [
            e["first_search"] for e in episodes if e["completion_ids"] == ids[: len(e["completion_ids"])]
        ]
    assert len(found) == len(codes)
    assert codes == compare_first_searches(found, inputs["advantages"].tolist(), prompts)
    assert set(codes) > {-1}
    shared = records[0].series["first_search_shared"]
    assert shared == sum(code == 1 for code in codes) / sum(code >= 0 for code in codes)


def test_without_what_rollouts_may_say_those_series_are_absent(tmp_path):
    plain = toy.Canned(drop=("answer_mask", "first_search", "valid_searches", "tool_failed"))
    records, _ = watched(make(tmp_path, rollout=plain, max_steps=2))
    assert records[1].series["first_search_shared"] is None
    assert records[1].series["displacement_correct_answer"] is None
    assert "llds/first_search_shared" not in records[1].metrics
    assert records[1].series["displacement_correct"] is not None


def test_with_a_lagged_anchor_series_still_start_from_the_policy_that_sampled(tmp_path):
    """The regulariser's own numbers go by its baseline."""
    records, _ = watched(make(tmp_path, max_steps=5, llds_baseline="anchor", llds_anchor_every=2))
    fresh = records[4]
    assert fresh.series["updates_since_rollout"] == 0
    assert fresh.series["displacement_abs"] == pytest.approx(0, abs=1e-6)
    assert fresh.sums["moved_tokens"] > 0
    assert fresh.metrics["llds/penalty"] > 0


def test_a_step_with_nan_is_counted_and_no_series_is_nan(tmp_path):
    def broken(completions, **kwargs):
        return [float("nan") if index == 0 else float(index % 2) for index in range(len(completions))]

    config = LLDSGRPOConfig(**toy.settings(tmp_path, max_steps=2))
    trainer = toy.trainer(LLDSGRPOTrainer, config, reward_funcs=broken)
    records, _ = watched(trainer)
    for record in records:
        assert all(value is None or math.isfinite(value) for value in record.series.values())


# --- the monitor


def replay(trainer, run):
    """Let the trainer log a synthetic run; return the step at which it asked to stop, if it did."""
    trainer.model.train()
    for step, row in enumerate(run.rows, start=1):
        trainer.state.global_step = step
        for name, value in row.items():
            if value is not None:
                trainer._metrics["train"][name].append(value)
        trainer.log({"loss": 0.0})
        if trainer.control.should_training_stop:
            return step
    return None


def test_an_alarm_goes_to_the_log_the_file_and_the_hooks(tmp_path, caplog):
    trainer = make(tmp_path)
    told = []
    trainer.llds.monitor.hooks.append(told.append)
    run = synthetic.spiral(3)
    with caplog.at_level(logging.INFO, "llds.engines.trl"):
        assert replay(trainer, run) is None
    alarms = [event for event in told if event.kind == "alarm"]
    assert alarms
    assert abs(alarms[0].onset - (run.onset + 1)) <= 10
    assert any("correct responses lose likelihood" in record.message for record in caplog.records)
    lines = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [line["kind"] for line in lines] == [event.kind for event in told]
    assert trainer.llds.monitor.events == told
    phases = [entry["llds/phase"] for entry in trainer.state.log_history]
    assert phases[0] == -1
    assert max(phases) == 3


def test_on_alarm_stop_stops_and_ignore_does_not_look(tmp_path):
    run = synthetic.spiral(3)
    stopped = replay(make(tmp_path, llds_on_alarm="stop"), run)
    assert stopped is not None
    assert run.onset < stopped < run.acceleration + 30
    silent = make(tmp_path / "silent", llds_on_alarm="ignore")
    replay(silent, run)
    assert "llds/phase" not in silent.state.log_history[-1]
    assert not (tmp_path / "silent" / EVENTS_FILE).exists()


def test_a_healthy_run_is_left_alone(tmp_path):
    trainer = make(tmp_path, llds_on_alarm="stop")
    assert replay(trainer, synthetic.sharpening(1)) is None
    assert not [event for event in trainer.llds.monitor.events if event.kind == "alarm"]


def test_monitor_sees_what_trl_calls_otherwise(tmp_path):
    """TRL's tool calls and lengths reach the signals of the behaviour family."""
    trainer = make(tmp_path)
    seen = []
    trainer.llds.monitor._phases.update = lambda step, series: seen.append(series) or []
    trainer.model.train()
    trainer._metrics["train"]["tools/call_frequency"] = [2.0, 4.0]
    trainer._metrics["train"]["completions/mean_length"] = [10.0, float("nan")]
    trainer.log({"loss": 0.0, "grad_norm": 1.5})
    assert (seen[0]["searches"], seen[0]["action_tokens"], seen[0]["grad_norm"]) == (3.0, 10.0, 1.5)


def test_evaluation_is_not_looked_at(tmp_path):
    trainer = make(tmp_path)
    trainer.model.eval()
    trainer.log({"eval_loss": 0.0})
    assert "llds/phase" not in trainer.state.log_history[-1]


def test_monitor_goes_on_where_the_checkpoint_was_written(tmp_path):
    schedule = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    whole = make(tmp_path / "whole", **schedule)
    whole.train()
    again = make(tmp_path / "again", **schedule)
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    kept = json.loads((checkpoint / MONITOR_FILE).read_text())
    assert kept["step"] == 4
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.llds.monitor._phases.state_dict() == whole.llds.monitor._phases.state_dict()


@pytest.mark.parametrize("damage", [None, "{", '{"version": 99}', "[]"])
def test_a_lost_or_broken_monitor_state_is_told_and_training_goes_on(tmp_path, caplog, damage):
    first = make(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    first.train()
    path = tmp_path / "checkpoint-2" / MONITOR_FILE
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage)
    again = make(tmp_path, max_steps=4)
    with caplog.at_level(logging.WARNING, "llds.engines.trl"):
        again.train(resume_from_checkpoint=str(path.parent))
    assert "the monitor starts anew" in caplog.text
    assert again.state.global_step == 4


def test_a_second_run_of_the_same_trainer_starts_with_a_fresh_monitor(tmp_path):
    trainer = make(tmp_path, max_steps=2)
    trainer.train()
    before = trainer.llds.monitor._phases
    trainer.train()
    assert trainer.llds.monitor._phases is not before


def test_options_reach_an_attached_trainer(tmp_path):
    plain = toy.trainer(GRPOTrainer, GRPOConfig(**toy.settings(tmp_path)))
    attach_llds(plain, on_alarm="stop", lld_epsilon=-0.5)
    assert plain.llds._window.dynamics.how.lld_epsilon == -0.5
    with pytest.raises(LLDSError, match="on_alarm must be one of"):
        LLDSGRPOConfig(**toy.settings(tmp_path), llds_on_alarm="panic")


def test_coefficient_can_be_changed_while_it_trains(tmp_path):
    trainer = make(tmp_path, max_steps=4)
    used = []
    trainer.llds.step_hooks.append(lambda record: used.append(record.metrics["llds/coef"]))
    trainer.llds.step_hooks.append(lambda record: trainer.llds.set_coef(0.5))
    trainer.train()
    assert used == [1.0, 0.5, 0.5, 0.5]
