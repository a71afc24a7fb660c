"""Penalties that people wrote into their own TRL trainer: right ones pass, each mistake is named."""

import pytest
from trl import GRPOConfig, GRPOTrainer

import trl_toy as toy
from llds.engines.trl import LLDSGRPOConfig, LLDSGRPOTrainer
from llds.engines.trl.preflight import preflight
from llds.errors import LLDSError
from own_penalty import make_class

TWO_MICRO_BATCHES = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 1,
}


def make(folder, cls, **overrides):
    policy = None
    if overrides.get("beta"):
        # TRL loads the reference policy from where the policy came from.
        policy = toy.model()
        policy.save_pretrained(folder / "start")
        policy.config._name_or_path = str(folder / "start")
    return toy.trainer(cls, GRPOConfig(**toy.settings(folder, **overrides)), policy=policy)


def faults(report):
    return [one.fault for one in report.findings if one.severity != "info"]


@pytest.mark.parametrize(
    ("gate", "overrides"),
    [
        ("action", {}),
        ("response", {}),
        ("token", {}),
        ("action", {"loss_type": "grpo"}),
        ("action", {"loss_type": "dr_grpo", "beta": 0.05}),
        ("action", {"loss_type": "cispo"}),
        ("action", {"loss_type": "sapo"}),
        ("action", {"loss_type": "grpo", "importance_sampling_level": "sequence", "entropy_coef": 0.01}),
        ("action", TWO_MICRO_BATCHES),
    ],
)
def test_a_right_penalty_of_ones_own_is_clean(tmp_path, gate, overrides):
    report = preflight(make(tmp_path, make_class(gate=gate), **overrides), coef=0.2, gate=gate)
    assert faults(report) == [], report.text
    assert {"L2", "L4", "L5", "L6", "L7", "L10", "L12", "L14"} <= set(report.checked)


@pytest.mark.parametrize(
    ("mistake", "fault", "words", "overrides"),
    [
        ("itself", "L1", "STRUCTURAL ZERO", {}),
        ("detached", "L2", "its gradient in the log-probs is 0", {}),
        ("reference", "L3", "answers to the log-probs of the reference policy", {"beta": 0.05}),
        ("mask of ones", "L4", "outside the response mask", {}),
        ("no feedback mask", "L4", "outside the response mask", {}),
        ("positive only", "L5", "with A = 0", {}),
        ("all", "L5", "with A < 0", {}),
        ("sum", "L7", "was meant", {}),
        ("micro-batch", "L7", "come in two", TWO_MICRO_BATCHES),
        ("never called", "L9", "no penalty is computed", {}),
        ("last only", "L10", "penalty answers to the last one only", TWO_MICRO_BATCHES),
        ("twice", "L12", "twice", {}),
        ("bare", "L14", "penalty is 0", {}),
    ],
)
def test_a_mistake_is_named(tmp_path, mistake, fault, words, overrides):
    report = preflight(make(tmp_path, make_class(mistake), **overrides), coef=0.2)
    assert set(faults(report)) == {fault}, report.text
    assert words in report.text


def test_absent_old_log_probs_taken_for_0(tmp_path):
    schedule = {"num_iterations": 1, "steps_per_generation": 1}
    report = preflight(make(tmp_path, make_class("absent is 0"), **schedule), coef=0.2)
    assert set(faults(report)) == {"L1", "L11"}
    assert "as if they all were 0" in report.text


@pytest.mark.parametrize(
    ("said", "done"), [("action", "response"), ("action", "token"), ("response", "action")]
)
def test_another_gate_than_said_is_named(tmp_path, said, done):
    report = preflight(make(tmp_path, make_class(gate=done)), coef=0.2, gate=said)
    assert faults(report) == ["L6"]
    assert f"like the gate '{done}', not '{said}'" in report.text


def test_a_loss_with_a_forward_pass_of_its_own_is_not_accused(tmp_path):
    report = preflight(make(tmp_path, make_class(beside=True)), coef=0.2)
    assert faults(report) == []
    assert "beside TRL's forward pass" in dict(report.unchecked)["L2"]


def test_settings_beside_an_attached_llds_are_a_mistake(tmp_path):
    trainer = toy.trainer(LLDSGRPOTrainer, LLDSGRPOConfig(**toy.settings(tmp_path)))
    with pytest.raises(LLDSError, match="knows its settings"):
        preflight(trainer, coef=0.2)
    with pytest.raises(LLDSError, match="LLDS has no setting 'lambda_'"):
        preflight(make(tmp_path, GRPOTrainer), lambda_=0.2)
