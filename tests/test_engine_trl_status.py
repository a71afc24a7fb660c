"""What LLDS says: zeros are explained, noise is warned of, mistakes are sentences, no failure is silent."""

import dataclasses
import logging
import re

import pytest
import torch
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

import trl_toy as toy
from llds.engines.trl import (
    LLDSGRPOConfig,
    LLDSGRPOTrainer,
    LLDSMixin,
    LLDSOptions,
    attach_llds,
    dropout_warnings,
    structural_status,
)
from llds.errors import LLDSError


def make(tmp_path, cls=LLDSGRPOTrainer, policy=None, prompts=8, **overrides):
    config = LLDSGRPOConfig(**toy.settings(tmp_path, **overrides))
    return toy.trainer(cls, config, policy=policy, train_dataset=toy.dataset(prompts))


def steps_of(trainer):
    """Train, and return the records of its optimizer steps and whether TRL gave old log-probs in each."""
    records, has_old = [], []
    trainer.llds.step_hooks.append(records.append)
    trainer.llds.observers.append(lambda *arrays: has_old.append("old_per_token_logps" in arrays[4]))
    trainer.train()
    return records, has_old


# --- zeros

SCHEDULES = [
    # gradient accumulation, steps per generation, iterations -> structurally zero steps out of six
    (1, 1, 1, [1, 1, 1, 1, 1, 1]),
    (2, 1, 1, [1, 1, 1, 1, 1, 1]),
    (4, 1, 4, [1, 1, 1, 1, 1, 1]),
    (2, 2, 1, [1, 1, 1, 1, 1, 1]),
    (1, 2, 1, [1, 0, 1, 0, 1, 0]),
    (1, 1, 3, [1, 0, 0, 1, 0, 0]),
    (2, 2, 2, [1, 0, 1, 0, 1, 0]),
    (2, 3, 1, [1, 0, 0, 1, 0, 0]),
    (4, 3, 1, [1, 0, 0, 1, 0, 0]),
]


@pytest.mark.parametrize(("accumulation", "per_generation", "iterations", "zeros"), SCHEDULES)
def test_zeros_by_construction_are_told_apart(tmp_path, accumulation, per_generation, iterations, zeros):
    trainer = make(
        tmp_path,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        num_iterations=iterations,
        per_device_train_batch_size=4,
        max_steps=6,
        prompts=24,
    )
    records, has_old = steps_of(trainer)
    always = all(zeros)
    assert trainer.llds_status.kind == ("structural_zero" if always else "partial")
    assert any(has_old) != always
    assert [record.metrics["llds/structural_zero"] for record in records] == zeros
    assert [record.verdict == "structural zero" for record in records] == [zero == 1 for zero in zeros]
    for record in records:
        moved = record.metrics["llds/moved_share"]
        assert moved == 0 if record.verdict == "structural zero" else moved > 0


def test_the_advice_counts_iterations(tmp_path):
    trainer = make(tmp_path, num_iterations=4, gradient_accumulation_steps=4, steps_per_generation=1)
    advised = int(re.search(r"set steps_per_generation=(\d+)", trainer.llds_status.text).group(1))
    assert advised == 2
    cured = make(tmp_path, num_iterations=4, gradient_accumulation_steps=4, steps_per_generation=advised)
    assert cured.llds_status.kind == "partial"


def test_structural_zero_is_told_at_the_start_and_its_advice_helps(tmp_path, caplog):
    trainer = make(tmp_path, num_iterations=1, max_steps=2, gradient_accumulation_steps=2)
    with caplog.at_level(logging.WARNING, "llds.engines.trl"):
        trainer.train()
    assert caplog.messages[0] == trainer.llds_status.text
    assert "STRUCTURAL ZERO" in caplog.messages[0]
    assert caplog.messages[-1] == "LLDS in 2 optimizer steps: 2 structural zero."
    advised = int(re.search(r"set steps_per_generation=(\d+)", trainer.llds_status.text).group(1))
    batch = int(re.search(r"generation_batch_size=(\d+)", trainer.llds_status.text).group(1))
    for advice in (
        {"steps_per_generation": advised},
        {"steps_per_generation": None, "generation_batch_size": batch},
    ):
        cured = make(tmp_path, num_iterations=1, max_steps=4, gradient_accumulation_steps=2, **advice)
        records, _ = steps_of(cured)
        assert cured.llds_status.kind == "partial"
        assert [record.verdict == "structural zero" for record in records] == [True, False, True, False]
    anchored = make(tmp_path, num_iterations=1, max_steps=3, llds_baseline="anchor")
    records, _ = steps_of(anchored)
    assert [record.verdict == "structural zero" for record in records] == [True, False, False]


def test_a_zero_that_was_found_is_a_measured_zero(tmp_path, caplog):
    """With a dead zone wider than any drop the penalty could act, and does not."""
    trainer = make(tmp_path, llds_dead_zone=1e6, max_steps=4)
    with caplog.at_level(logging.WARNING, "llds.engines.trl"):
        trainer.train()
    assert trainer.llds.verdicts == {"structural zero": 2, "measured zero": 2}
    assert caplog.messages == [
        trainer.llds_status.text,
        "LLDS in 4 optimizer steps: 2 measured zero, 2 structural zero.",
    ]


def test_a_live_status_is_seen_once_without_any_logging_set_up(tmp_path, caplog):
    trainer = make(tmp_path, max_steps=2)
    with caplog.at_level(logging.WARNING, "llds.engines.trl"):
        trainer.train()
        trainer.train()
    assert [text for text in caplog.messages if "LLDS is live" in text] == [trainer.llds_status.text]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "llds.engines.trl"):
        make(tmp_path, max_steps=1, llds_coef=0.0).train()
    assert caplog.messages == []


def test_correction_for_vllm_does_not_make_it_live():
    """TRL then passes old log-probs, but of the same weights."""
    config = GRPOConfig(**toy.settings("unused", num_iterations=1), use_vllm=True)
    assert structural_status(config, LLDSOptions()).kind == "structural_zero"


def test_status_of_the_other_baselines(tmp_path):
    config = GRPOConfig(**toy.settings(tmp_path, num_iterations=1))
    assert structural_status(config, LLDSOptions(baseline="reference")).kind == "live"
    assert structural_status(config, LLDSOptions(baseline="anchor")).kind == "partial"
    assert structural_status(config, LLDSOptions(coef=0.0)).kind == "off"


# --- metrics


def test_one_record_per_optimizer_step_of_means_over_all_its_micro_batches(tmp_path):
    """Means over the tokens of the whole step, not means of micro-batch means."""
    trainer = make(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=4,
        learning_rate=0.1,
    )
    arrays = []
    trainer.llds.observers.append(lambda *four: arrays.append(four[:4]))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "llds/loss" in entry]
    assert len(logs) == 4
    assert [entry["llds/structural_zero"] for entry in logs] == [1, 0, 1, 0]
    assert [("llds/noise_floor" in entry) for entry in logs] == [True, False, True, False]
    assert logs[0]["llds/noise_floor"] == 0.0
    step = arrays[4:8]
    is_biased = []
    for name, chosen in {"correct": lambda a: a > 1e-3, "wrong": lambda a: a < -1e-3}.items():
        drop, logprob, tokens = 0.0, 0.0, 0
        means = []
        for new, old, advantages, mask in step:
            part = mask.bool() & chosen(advantages).unsqueeze(1)
            assert not new.requires_grad
            drop += float((old - new)[part].sum())
            logprob += float(new[part].sum())
            tokens += int(part.sum())
            means += [float((old - new)[part].mean())] if part.any() else []
        assert logs[1][f"llds/displacement_{name}"] == pytest.approx(drop / tokens, rel=1e-5)
        assert logs[1][f"llds/logprob_{name}"] == pytest.approx(logprob / tokens, rel=1e-5)
        is_biased.append(sum(means) / len(means) != pytest.approx(drop / tokens, rel=1e-3))
    assert any(is_biased)
    # A conditional mean over nothing is left out, not shown as zero.
    assert all(torch.isfinite(torch.tensor(value)) for entry in logs for value in entry.values())


def test_noise_floor_measures_the_noise_of_dropout(tmp_path):
    quiet = make(tmp_path, max_steps=1)
    noisy = make(tmp_path, max_steps=1, policy=toy.model(attention_dropout=0.2))
    assert steps_of(quiet)[0][0].metrics["llds/noise_floor"] == 0.0
    assert steps_of(noisy)[0][0].metrics["llds/noise_floor"] > 1e-3


# --- dropout


def test_dropout_is_warned_of_with_the_setting_to_change(tmp_path, caplog):
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.05)
    settings = toy.settings(tmp_path, max_steps=1)
    for cure, expected in (
        ({}, ["disable_dropout=True", "attention_dropout=0.0"]),
        ({"disable_dropout": True}, ["attention_dropout=0.0"]),
    ):
        caplog.clear()
        config = LLDSGRPOConfig(**settings, **cure)
        trainer = toy.trainer(
            LLDSGRPOTrainer, config, policy=toy.model(attention_dropout=0.1), peft_config=lora
        )
        with caplog.at_level(logging.WARNING, "llds.engines.trl"):
            trainer.train()
        warned = [text for text in caplog.messages if "penalises noise" in text]
        assert len(warned) == len(expected)
        assert all(setting in text for setting, text in zip(expected, warned, strict=True))
    assert "p=0.1" in warned[0]
    assert dropout_warnings(toy.model()) == []


# --- never silently off


class OwnLoss(GRPOTrainer):
    """A trainer that does not pass its log-probs through TRL's method."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        return -model(input_ids=ids).logits.log_softmax(-1).mean()


class TwiceSeen(GRPOTrainer):
    """A trainer that computes TRL's loss twice, so no one forward pass is the one to add to."""

    def compute_loss(self, *args, **kwargs):
        return (super().compute_loss(*args, **kwargs) + super().compute_loss(*args, **kwargs)) / 2


@pytest.mark.parametrize("cls", [OwnLoss, TwiceSeen])
@pytest.mark.parametrize("coef", [0.2, 0.0])
def test_log_probs_not_seen_exactly_once_stop_the_run_before_the_optimizer_acts(tmp_path, cls, coef):
    trainer = toy.trainer(cls, GRPOConfig(**toy.settings(tmp_path)))
    before = toy.weights(trainer)
    attach_llds(trainer, coef=coef)
    with pytest.raises(RuntimeError, match="exactly once in 1 of 1 micro-batches") as caught:
        trainer.train()
    assert cls.__name__ in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in toy.weights(trainer).items())


class Users(GRPOTrainer):
    """A user's trainer with methods of its own, which go on working under LLDS."""

    calls = 0

    def compute_loss(self, *args, **kwargs):
        self.calls += 1
        return 2 * super().compute_loss(*args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        return 3 * super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        with torch.no_grad():
            super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def test_attach_keeps_a_users_own_trainer(tmp_path):
    settings = toy.settings(tmp_path, num_iterations=4, max_steps=8)
    plain = toy.trainer(Users, GRPOConfig(**settings))
    plain.train()
    attached = toy.trainer(Users, GRPOConfig(**settings))
    assert attach_llds(attached, coef=0.0, gate="response") is attached
    attached.train()
    assert isinstance(attached, Users)
    assert isinstance(attached, LLDSMixin)
    assert attached.calls == 8
    assert plain.state.log_history[0]["reward"] == attached.state.log_history[0]["reward"]
    other = toy.weights(attached)
    assert all(torch.equal(p, other[name]) for name, p in toy.weights(plain).items())
    assert attached.llds.verdicts["active"] >= 1


def test_mixin_makes_a_users_trainer_llds(tmp_path):
    class Mine(LLDSMixin, Users):
        pass

    trainer = make(tmp_path, Mine, num_iterations=4, max_steps=8)
    trainer.train()
    assert trainer.calls == 8
    assert trainer.llds.verdicts["active"] >= 1


def test_mistakes_at_attaching_are_sentences(tmp_path):
    plain = toy.trainer(GRPOTrainer, GRPOConfig(**toy.settings(tmp_path)))
    for options, sentence in [
        ({"gates": "action"}, "LLDS has no setting 'gates'; it has coef, warmup_steps, gate"),
        ({"coef": -1.0}, "coef must be at least 0"),
        ({"baseline": "reference"}, "TRL keeps only with beta above 0"),
    ]:
        with pytest.raises(LLDSError, match=sentence):
            attach_llds(plain, **options)
        assert type(plain) is GRPOTrainer
        assert len([c for c in plain.callback_handler.callbacks if "llds" in type(c).__module__]) == 0
    attach_llds(plain)
    with pytest.raises(LLDSError, match="count the penalty twice"):
        attach_llds(plain)
    with pytest.raises(LLDSError, match=r"needs a trl.GRPOTrainer, but got str"):
        attach_llds("trainer")
    with pytest.raises(LLDSError, match="use that trainer, or give this one a GRPOConfig"):
        attach_llds(toy.trainer(GRPOTrainer, LLDSGRPOConfig(**toy.settings(tmp_path))))
    with pytest.raises(LLDSError, match=r"needs args=LLDSGRPOConfig\(...\), but got GRPOConfig"):
        toy.trainer(LLDSGRPOTrainer, GRPOConfig(**toy.settings(tmp_path)))


# --- settings


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("coef", -0.1, "llds_coef must be at least 0"),
        ("coef", float("nan"), "llds_coef must be at least 0"),
        ("coef", float("inf"), "llds_coef must be a finite number"),
        ("coef", "0.2", "llds_coef must be a finite number"),
        ("gate", "turn", "llds_gate must be one of 'action', 'response', 'token', but is 'turn'"),
        ("normalizer", "gated", "llds_normalizer must be one of 'all', 'preserved', 'response'"),
        ("baseline", "lagged", "llds_baseline must be one of 'old', 'reference', 'anchor'"),
        ("anchor_every", 0, "llds_anchor_every must be at least 1"),
        ("anchor_every", 1.5, "llds_anchor_every must be a whole number of optimizer steps"),
        ("warmup_steps", -1, "llds_warmup_steps must be at least 0"),
        ("preserve", "all", "llds_preserve must be one of"),
        ("penalty", "square", "llds_penalty must be one of"),
        ("huber_width", 0.0, "llds_huber_width must be above 0"),
        ("answer_weight", "often", 'llds_answer_weight must be a number, "auto" or None'),
        ("answer_weight", -1.0, "llds_answer_weight must be at least 0"),
        ("answer_searches", 0.0, "llds_answer_searches must be above 0"),
        ("dead_zone", -1e-3, "llds_dead_zone must be at least 0"),
    ],
)
def test_wrong_settings_are_sentences(tmp_path, name, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        LLDSGRPOConfig(**toy.settings(tmp_path), **{f"llds_{name}": value})


def test_config_has_every_setting_with_help_and_the_same_default():
    config = {item.name: item for item in dataclasses.fields(LLDSGRPOConfig) if item.name.startswith("llds_")}
    options = dataclasses.fields(LLDSOptions)
    assert list(config) == [f"llds_{item.name}" for item in options]
    for item in options:
        field = config[f"llds_{item.name}"]
        assert field.default == item.default
        assert len(field.metadata["help"]) > 40


def test_settings_from_a_command_line(tmp_path):
    base = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    given = ["--llds_coef", "0.1", "--llds_answer_weight", "auto", "--llds_warmup_steps", "5"]
    (config,) = HfArgumentParser(LLDSGRPOConfig).parse_args_into_dataclasses([*base, *given])
    assert config.llds_options() == LLDSOptions(coef=0.1, answer_weight="auto", warmup_steps=5)
    (config,) = HfArgumentParser(LLDSGRPOConfig).parse_args_into_dataclasses(
        [*base, "--llds_answer_weight", "0.5"]
    )
    assert config.llds_options().answer_weight == 0.5


# --- checkpoints


RESUME = {
    "num_iterations": 1,
    "max_steps": 6,
    "learning_rate": 0.1,
    "llds_baseline": "anchor",
    "llds_anchor_every": 2,
    "llds_warmup_steps": 5,
    "llds_coef": 1.0,
}


def test_resume_continues_warm_up_and_anchor(tmp_path):
    whole = make(tmp_path / "a", save_strategy="steps", save_steps=4, **RESUME)
    records, _ = steps_of(whole)
    assert [r.metrics["llds/coef"] for r in records] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    checkpoint = tmp_path / "a" / "checkpoint-4"

    resumed = make(tmp_path / "b", policy=toy.model(seed=5), **RESUME)
    told = []
    resumed.llds.step_hooks.append(told.append)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert [r.step for r in told] == [4, 5]
    assert [r.metrics for r in told] == [r.metrics for r in records[4:]]
    assert resumed.llds.anchor.lag == whole.llds.anchor.lag
    other = toy.weights(resumed)
    assert all(torch.equal(p, other[name]) for name, p in toy.weights(whole).items())
    assert {r.verdict for r in told} == {"active"}


def test_checkpoint_without_an_anchor_is_refused(tmp_path):
    without = {**RESUME, "llds_baseline": "old"}
    make(tmp_path / "a", save_strategy="steps", save_steps=2, **without).train()
    resumed = make(tmp_path / "b", **RESUME)
    # An anchor left from an earlier run of the same trainer is not taken for it.
    resumed.train()
    with pytest.raises(LLDSError, match=r"The checkpoint has no llds_anchor.safetensors"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))


def test_a_second_run_of_a_trainer_starts_anew(tmp_path):
    trainer = make(tmp_path, **RESUME)
    trainer.train()
    first = trainer.llds.anchor
    trainer.train()
    assert trainer.llds.anchor is not first
    assert trainer.llds.verdicts.total() == 6
