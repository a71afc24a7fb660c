"""Faults built into a small real TRL trainer are found and named; clean trainers give no finding."""

import math

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

import trl_toy as toy
from llds.engines.trl import LLDSGRPOConfig, LLDSGRPOTrainer, attach_llds, window
from llds.engines.trl.preflight import preflight
from llds.engines.trl.runtime import LLDSRuntime


def make(folder, cls=LLDSGRPOTrainer, rollout=None, policy=None, **overrides):
    if overrides.get("beta"):
        # TRL loads the reference policy from where the policy came from.
        policy = toy.model()
        policy.save_pretrained(folder / "start")
        policy.config._name_or_path = str(folder / "start")
    config = LLDSGRPOConfig(**toy.settings(folder, **overrides))
    return toy.trainer(cls, config, rollout=rollout, policy=policy)


def faults(report, worst=("certain", "likely")):
    return {one.fault for one in report.findings if one.severity in worst}


# --- planted faults


def test_clean_trainer_has_no_finding(tmp_path):
    report = preflight(make(tmp_path))
    assert report.findings == ()
    assert report.is_clean
    assert set(report.checked) == {f"L{i}" for i in range(1, 15)}
    assert "Tokens of the policy" in report.text


def test_l1_one_optimizer_step_per_rollout(tmp_path):
    report = preflight(make(tmp_path, num_iterations=1, steps_per_generation=1))
    assert faults(report, ("certain",)) == {"L1"}
    (finding,) = report.certain
    assert "STRUCTURAL ZERO" in finding.evidence
    assert "steps_per_generation=2" in finding.change


def test_l2_a_detached_penalty(tmp_path, monkeypatch):
    trainer = make(tmp_path)
    add_term = LLDSRuntime.add_term

    def detached(self, loss, inputs, captured):
        return loss + (add_term(self, loss, inputs, captured) - loss).detach()

    monkeypatch.setattr(LLDSRuntime, "add_term", detached)
    assert faults(preflight(trainer)) == {"L2"}


def test_l2_no_parameter_is_trained(tmp_path):
    trainer = make(tmp_path)
    for parameter in trainer.model.parameters():
        parameter.requires_grad_(False)
    report = preflight(trainer)
    assert "L2" in faults(report) or "L9" in faults(report)


def test_l3_old_log_probs_of_the_reference(tmp_path):
    trainer = make(tmp_path, beta=0.1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)
    score = trainer._generate_and_score_completions

    def scored(inputs):
        batch = score(inputs)
        batch["old_per_token_logps"] = batch["ref_per_token_logps"]
        return batch

    trainer._generate_and_score_completions = scored
    report = preflight(trainer)
    assert faults(report) == {"L3"}
    assert "those of the reference policy" in report.text


def test_l3_penalty_measured_from_something_else(tmp_path, monkeypatch):
    baseline = LLDSRuntime._baseline

    def shifted(self, inputs, logprobs, anchored):
        return baseline(self, inputs, logprobs, anchored) + 0.05

    monkeypatch.setattr(LLDSRuntime, "_baseline", shifted)
    report = preflight(make(tmp_path))
    assert "L3" in faults(report, ("certain",))
    assert "where new and old log-probs are the same" in report.text


def test_l3_dropout(tmp_path):
    report = preflight(make(tmp_path, policy=toy.model(attention_dropout=0.1)))
    assert "L3" in faults(report)
    assert "attention_dropout=0.0" in report.text


class NoFeedbackMask(toy.Canned):
    """Gives log-probs for what the policy sampled, and forgets to mask what the tool wrote."""

    def __call__(self, prompts, trainer):
        answer = super().__call__(prompts, trainer)
        answer["logprobs"] = [[-1.0 if bit else 0.0 for bit in mask] for mask in answer["env_mask"]]
        answer["env_mask"] = [[1] * len(mask) for mask in answer["env_mask"]]
        return answer


def test_l4_feedback_in_the_mask(tmp_path):
    report = preflight(make(tmp_path, rollout=NoFeedbackMask()))
    assert "L4" in faults(report, ("certain",))
    assert "tokens that a tool wrote are in it" in report.text


def test_l4_the_penalty_gets_another_mask(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "llds.engines.trl.runtime.response_mask", lambda inputs: torch.ones_like(inputs["completion_mask"])
    )
    report = preflight(make(tmp_path))
    assert "L4" in faults(report, ("certain",))
    assert "outside the response mask" in report.text


class Forgetful(LLDSGRPOTrainer):
    """Loses the rollout's mask on the way to the loss."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        del batch["tool_mask"]
        return batch


def test_l4_the_mask_of_the_rollout_got_lost(tmp_path):
    """No tag and no log-prob tells; the rollout's own mask does."""
    report = preflight(make(tmp_path, cls=Forgetful))
    assert faults(report) == {"L4"}
    assert "that the policy did not write, as the rollout says" in report.text


def test_l4_tokens_of_the_policy_got_lost(tmp_path):
    class Short(LLDSGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            batch["tool_mask"][:, 0] = 0
            return batch

    report = preflight(make(tmp_path, cls=Short))
    assert faults(report) == {"L4"}
    assert "8 tokens are not in it that the policy wrote" in report.text


class Sure(toy.Canned):
    """The policy's likeliest tokens with their true log-probs, which are 0 where it is sure."""

    def __call__(self, prompts, trainer):
        answer = super().__call__(prompts, trainer)
        ids, logprobs, masks = [], [], []
        for place, prompt in enumerate(answer["prompt_ids"]):
            written, told = [], []
            for index in range(6):
                with torch.no_grad():
                    logits = trainer.model(input_ids=torch.tensor([[*prompt, *written]])).logits[0, -1]
                is_policy = index not in (2, 3)
                token = int(logits[2:].argmax()) + 2 if is_policy else 2 + (7 * place + index) % 40
                told.append(float(logits.log_softmax(-1)[token]) if is_policy else 0.0)
                written.append(token)
            ids.append(written)
            logprobs.append(told)
            masks.append([1, 1, 0, 0, 1, 1])
        self.sure = sum(value == 0 for row in logprobs for value in row) - 2 * len(ids)
        return answer | {
            "completion_ids": ids,
            "logprobs": logprobs,
            "env_mask": masks,
            "answer_mask": [[0, 0, 0, 0, 0, 1] for _ in ids],
        }


def test_a_policy_that_is_sure_of_its_tokens_is_clean(tmp_path):
    """A sampled log-prob of exactly 0 is what a likely token has, and no sign of feedback."""
    policy, rollout = toy.model(), Sure()
    with torch.no_grad():
        policy.model.norm.weight.mul_(60)
    report = preflight(make(tmp_path, policy=policy, rollout=rollout))
    assert rollout.sure >= 4
    assert faults(report) == set(), report.text


def change_loss(monkeypatch, **changes):
    """Let the trainer call the penalty with other settings than it says."""
    from llds import llds_loss

    def changed(*args, **options):
        return llds_loss(*args, **(options | changes))

    monkeypatch.setattr("llds.engines.trl.runtime.llds_loss", changed)


def test_l5_only_positive_advantages(tmp_path, monkeypatch):
    change_loss(monkeypatch, preserve="positive")
    assert faults(preflight(make(tmp_path))) == {"L5"}


def test_l5_all_advantages(tmp_path, monkeypatch):
    change_loss(monkeypatch, advantage_tol=10.0)
    report = preflight(make(tmp_path))
    assert faults(report) == {"L5"}
    assert "with A < 0" in report.text


@pytest.mark.parametrize(("said", "done"), [("action", "token"), ("action", "response"), ("token", "action")])
def test_l6_another_gate(tmp_path, monkeypatch, said, done):
    change_loss(monkeypatch, gate=done)
    report = preflight(make(tmp_path, llds_gate=said))
    assert faults(report) == {"L6"}
    assert f"like the gate '{done}', not '{said}'" in report.text


def test_l7_another_normaliser(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "llds.engines.trl.runtime.BatchCounter.count", lambda self, inputs, position: torch.tensor(8.0)
    )
    report = preflight(make(tmp_path))
    assert faults(report) == {"L7"}
    assert "that of the normaliser 'response'" in report.text


def test_l7_n_of_each_micro_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "llds.engines.trl.runtime.BatchCounter.count",
        lambda self, inputs, position: self._count_one(inputs).float(),
    )
    schedule = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4
    }  # fmt: skip
    report = preflight(make(tmp_path, **schedule))
    assert faults(report) == {"L7"}
    assert "depends on the micro-batch size" in report.text


def test_l7_published_coefficient_with_another_normaliser(tmp_path):
    report = preflight(make(tmp_path, llds_normalizer="response", llds_coef=0.2))
    assert faults(report) == {"L7"}
    assert "convert_coef" in report.text


class InvertedAnswers(toy.Canned):
    def __call__(self, prompts, trainer):
        answer = super().__call__(prompts, trainer)
        answer["answer_mask"] = [[1 - bit for bit in mask] for mask in answer["answer_mask"]]
        return answer


class NoAnswers(toy.Canned):
    def __call__(self, prompts, trainer):
        answer = super().__call__(prompts, trainer)
        answer["answer_mask"] = [[0] * len(mask) for mask in answer["answer_mask"]]
        return answer


@pytest.mark.parametrize(
    ("rollout", "words"), [(InvertedAnswers(), "looks inverted"), (NoAnswers(), "no token")]
)
def test_l8_answer_mask(tmp_path, rollout, words):
    report = preflight(make(tmp_path, rollout=rollout, llds_answer_weight=0.5))
    assert faults(report) == {"L8"}
    assert words in report.text


def test_l8_the_weight_is_not_used(tmp_path, monkeypatch):
    change_loss(monkeypatch, answer_weight=1.0)
    report = preflight(make(tmp_path, llds_answer_weight=0.5))
    assert faults(report) == {"L8"}
    assert "not 0.5 times" in report.text


def test_l8_no_answer_mask_at_all(tmp_path):
    trainer = make(tmp_path, rollout=toy.Canned(drop=("answer_mask",)), llds_answer_weight=0.5)
    report = preflight(trainer)
    assert faults(report) == {"L8"}
    assert "needs a rollout_func that returns 'answer_mask'" in report.text


def test_l9_configured_but_the_trainer_is_plain(tmp_path):
    trainer = toy.trainer(GRPOTrainer, LLDSGRPOConfig(**toy.settings(tmp_path)))
    report = preflight(trainer)
    assert faults(report) == {"L9"}
    assert "attach_llds" in report.text


def test_l9_a_loss_that_goes_another_way(tmp_path):
    class Own(GRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            return model(input_ids=ids).logits.float().logsumexp(-1).mean()

    trainer = attach_llds(toy.trainer(Own, GRPOConfig(**toy.settings(tmp_path))))
    assert faults(preflight(trainer)) == {"L9"}


def test_l9_an_override_drops_the_term(tmp_path):
    class Dropped(LLDSGRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return GRPOTrainer.compute_loss(self, model, inputs, *args, **kwargs)

    assert faults(preflight(make(tmp_path, cls=Dropped))) == {"L9"}


def test_l10_metrics_of_the_last_micro_batch(tmp_path, monkeypatch):
    def add(self, values):
        self.micro_batches += 1
        self._sums = {name: value.detach().double() for name, value in values.items()}

    monkeypatch.setattr(window.Window, "add", add)
    report = preflight(make(tmp_path))
    assert faults(report) == {"L10"}


def test_l11_missing_log_probs_filled_with_zero(tmp_path):
    trainer = make(tmp_path)
    score = trainer._generate_and_score_completions

    def scored(inputs):
        batch = score(inputs)
        batch["old_per_token_logps"] = batch["old_per_token_logps"].clone()
        batch["old_per_token_logps"][:, ::3] = 0.0
        return batch

    trainer._generate_and_score_completions = scored
    report = preflight(trainer)
    assert faults(report) == {"L11"}


def test_l11_absent_log_probs_taken_for_zero(tmp_path, monkeypatch):
    def filled(self, inputs, logprobs, anchored):
        return inputs.get("old_per_token_logps", torch.zeros_like(logprobs))

    monkeypatch.setattr(LLDSRuntime, "_baseline", filled)
    report = preflight(make(tmp_path, num_iterations=1, steps_per_generation=1))
    assert faults(report) == {"L1", "L11"}
    assert "as if they all were 0" in report.text


def test_l12_twice(tmp_path, monkeypatch):
    from llds import LLDSOutput, llds_loss

    def twice(*args, **options):
        output = llds_loss(*args, **options)
        return LLDSOutput(2 * output.loss, output.metrics)

    monkeypatch.setattr("llds.engines.trl.runtime.llds_loss", twice)
    report = preflight(make(tmp_path))
    assert faults(report) == {"L12"}


def test_l12_reference_baseline_and_strong_kl(tmp_path):
    assert faults(preflight(make(tmp_path, llds_baseline="reference", beta=0.1))) == {"L12"}


def test_l13_small_groups(tmp_path):
    trainer = make(tmp_path, num_generations=2, rollout=toy.Canned(generations=2))
    assert faults(preflight(trainer)) == {"L13"}


def test_l14_a_bare_zero(tmp_path, monkeypatch):
    make_record = window.make_record

    def bare(*args):
        record = make_record(*args)
        record.metrics.pop("llds/structural_zero")
        return record

    monkeypatch.setattr("llds.engines.trl.runtime.make_record", bare)
    assert faults(preflight(make(tmp_path))) == {"L14"}


# --- clean trainers


class Shape(toy.Canned):
    """Canned rollouts of another shape: ``turns`` actions with feedback between them."""

    def __init__(self, turns, empty=False, **kwargs):
        super().__init__(**kwargs)
        self.turns, self.empty = turns, empty

    def episode(self, prompt, place):
        episode = super().episode(prompt, place)
        mask = [*([1, 1, 0] * self.turns)[:-1], 1]
        length = len(mask)
        if self.empty and place == 0:
            mask = [0] * length
        ids = (episode["completion_ids"] * length)[: length - 1]
        return episode | {
            "completion_ids": [*[2 if token == 1 else token for token in ids], 1],
            "env_mask": mask,
            "answer_mask": [0] * (length - 2) + [1, 0],
        }


CLEAN = {
    "two passes": {"num_iterations": 2},
    "two steps per rollout": {"num_iterations": 1, "steps_per_generation": 2},
    "steps that cut a rollout": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "steps_per_generation": 2,
        "num_iterations": 1,
    },
    "micro-batches": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4
    },
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "cispo": {"loss_type": "cispo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "response gate, one turn": {"llds_gate": "response", "rollout": Shape(1)},
    "token gate": {"llds_gate": "token"},
    "preserved normaliser": {"llds_normalizer": "preserved", "llds_coef": 0.08},
    "response normaliser": {"llds_normalizer": "response", "llds_coef": 0.01},
    "huber": {"llds_penalty": "huber"},
    "dead zone": {"llds_dead_zone": 0.01},
    "warm-up": {"llds_warmup_steps": 10},
    "answer weight": {"llds_answer_weight": 0.5},
    "answers spared": {"llds_answer_weight": 0.0},
    "answer weight from searches": {"llds_answer_weight": "auto"},
    "light KL": {"beta": 0.001},
    "anchor": {"llds_baseline": "anchor", "num_iterations": 1},
    "reference": {"llds_baseline": "reference", "beta": 0.001},
    "one turn": {"rollout": Shape(1)},
    "eight turns": {"rollout": Shape(8), "max_completion_length": 64},
    "empty responses": {"rollout": Shape(3, empty=True)},
    "failed tools": {"rollout": toy.Canned(failed=(1,))},
    "no extras": {"rollout": toy.Canned(drop=("answer_mask", "first_search", "valid_searches", "tool_failed"))},
    "large groups": {"num_generations": 8, "rollout": toy.Canned(generations=8)},
    "gradient clipping": {"max_grad_norm": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_clean_variations_give_no_finding(tmp_path, name):
    options = dict(CLEAN[name])
    report = preflight(make(tmp_path, rollout=options.pop("rollout", None), **options))
    assert [one.text for one in report.findings if one.severity != "info"] == []


def test_an_attached_trainer_and_lora_are_clean(tmp_path):
    config = GRPOConfig(**toy.settings(tmp_path))
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0)
    trainer = attach_llds(toy.trainer(GRPOTrainer, config, peft_config=lora))
    # LoRA begins as the identity with one of its matrices at 0, which still lets a gradient through.
    assert preflight(trainer).is_clean


def test_without_lambda_only_grpo_is_looked_at(tmp_path):
    report = preflight(make(tmp_path, llds_coef=0.0, num_iterations=1, steps_per_generation=1))
    assert report.is_clean


# --- as if nothing had happened


def test_a_preflight_leaves_everything_as_it_was(tmp_path):
    plain, looked = make(tmp_path / "a", max_steps=4), make(tmp_path / "b", max_steps=4)
    random_state, before = torch.get_rng_state(), toy.weights(looked)
    preflight(looked)
    assert torch.equal(random_state, torch.get_rng_state())
    for name, p in toy.weights(looked).items():
        assert torch.equal(p, before[name])
    assert all(p.grad is None for p in looked.model.parameters())
    assert looked.llds.last_step is None
    assert not looked.llds.verdicts
    assert not looked._metrics["train"]
    assert (looked._step, looked._buffered_inputs) == (plain._step, plain._buffered_inputs)
    plain.train()
    looked.train()
    # Torch's sums depend on where in memory the numbers lie, so two trainings may differ in the last bit.
    for name, p in toy.weights(plain).items():
        torch.testing.assert_close(p, toy.weights(looked)[name], rtol=0, atol=1e-6)
    for mine, theirs in zip(plain.state.log_history, looked.state.log_history, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine.get("num_tokens") == theirs.get("num_tokens")
        assert mine.get("reward") == theirs.get("reward")


def test_what_a_users_trainer_keeps_is_put_back(tmp_path):
    class Counting(LLDSGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.calls, self.seen = 0, {"rows": []}

        def compute_loss(self, model, inputs, *args, **kwargs):
            self.calls += 1
            self.seen["rows"].append(len(inputs["prompt_ids"]))
            self.later = True
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = make(tmp_path, cls=Counting)
    had, rows = dict(vars(trainer)), trainer.seen["rows"]
    active = trainer.accelerator.gradient_state.active_dataloader
    trainer.model.eval()
    preflight(trainer)
    assert (trainer.calls, trainer.seen, trainer.seen["rows"] is rows) == (0, {"rows": []}, True)
    assert vars(trainer) == had
    assert not trainer.model.training
    assert trainer.accelerator._dataloaders == []
    assert trainer.accelerator.gradient_state.active_dataloader is active


def test_the_model_runs_a_few_times_only(tmp_path):
    trainer, calls = make(tmp_path), []
    trainer.model.register_forward_hook(lambda *seen: calls.append(torch.is_grad_enabled()))
    assert preflight(trainer).is_clean
    assert sum(calls) == 3
    assert len(calls) == 4


def test_hooks_are_not_called_and_stay(tmp_path):
    trainer, called = make(tmp_path), []
    trainer.llds.step_hooks.append(called.append)
    trainer.llds.observers.append(lambda *seen: called.append(seen))
    preflight(trainer)
    assert called == []
    assert len(trainer.llds.step_hooks) == len(trainer.llds.observers) == 1
    assert math.isclose(trainer.llds.options.coef, 0.2)
