"""The LLDS term in TRL: value and gradient against a second forward pass, and what must not change them."""

import inspect
import itertools
import logging
import re

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

import trl_toy as toy
from llds import llds_loss
from llds.engines.trl import LLDSGRPOConfig, LLDSGRPOTrainer, attach_llds

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def llds_trainer(tmp_path, *, policy=None, rollout=None, cls=LLDSGRPOTrainer, **overrides):
    return toy.trainer(
        cls, LLDSGRPOConfig(**toy.settings(tmp_path, **overrides)), policy=policy, rollout=rollout
    )


def moved(trainer):
    """Run one rollout, then move and sharpen the weights: displacement is of both signs, mostly a drop."""
    trainer.train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(1.2).add_(torch.randn(p.shape, generator=generator), alpha=0.05)
    trainer.model.train()
    return trainer, trainer._buffered_inputs[0]


def second_forward(trainer, inputs):
    """Log-probs [B, T] by a forward pass of a plain copy of the model, and that copy."""
    copy = toy.model()
    copy.load_state_dict(trainer.model.state_dict())
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = copy(input_ids=ids, attention_mask=attention).logits
    width = inputs["completion_ids"].size(1)
    logprobs = logits[:, -width - 1 : -1].log_softmax(-1)
    return logprobs.gather(2, inputs["completion_ids"].unsqueeze(2)).squeeze(2), copy


def actions_of(mask):
    """Yield the index ranges of the runs of ones in a list."""
    start = None
    for i, bit in enumerate([*mask, 0]):
        if bit and start is None:
            start = i
        if not bit and start is not None:
            yield range(start, i)
            start = None


def term_by_hand(logprobs, inputs, coef=0.2, gate="action", normalizer="all", answer_weight=1.0):
    """λ · Σ gate · w · max(0, d) / N, token by token."""
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).tolist()
    drop = inputs["old_per_token_logps"] - logprobs
    drops = drop.tolist()
    total, tokens, preserved = 0.0, 0, 0
    for row, advantage in enumerate(inputs["advantages"].tolist()):
        spans = list(actions_of(mask[row]))
        tokens += sum(len(span) for span in spans)
        if advantage < -1e-3:
            continue
        preserved += sum(len(span) for span in spans)
        whole = sum(drops[row][i] for span in spans for i in span)
        for span in spans:
            summed = sum(drops[row][i] for i in span)
            opens = {"action": summed > 0, "response": whole > 0, "token": True}[gate]
            for i in span if opens else ():
                is_answer = "llds_answer_mask" in inputs and inputs["llds_answer_mask"][row, i] == 1
                total = total + (answer_weight if is_answer else 1.0) * drop[row, i].clamp(min=0)
    return coef * total / {"all": tokens, "preserved": preserved, "response": len(mask)}[normalizer]


def assert_term(trainer, inputs, **by_hand):
    """The loss and its gradient are those of plain TRL plus the term of an own second forward pass."""
    plain = GRPOTrainer.compute_loss(trainer, trainer.model, inputs)
    plain.backward()
    plain_gradient = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()

    logprobs, copy = second_forward(trainer, inputs)
    expected = term_by_hand(logprobs, inputs, **by_hand)
    expected.backward()
    assert expected > 1e-3
    # Both sides are float32: where the policy's part is large, the difference of two losses is as coarse as
    # that.
    coarse = 1e-6 * max(1.0, float(plain.detach().abs()))
    torch.testing.assert_close(loss - plain, expected, rtol=0, atol=coarse)
    for name, p in copy.named_parameters():
        got = trainer.model.get_parameter(name).grad - plain_gradient[name]
        torch.testing.assert_close(got, p.grad, rtol=1e-4, atol=1e-6)
    assert trainer.llds.last_step.verdict == "active"
    assert trainer.llds.last_step.metrics["llds/loss"] == pytest.approx(float(expected.detach()), abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_value_and_gradient_are_those_of_a_second_forward(tmp_path, loss_type):
    trainer, inputs = moved(llds_trainer(tmp_path, loss_type=loss_type, max_steps=1))
    assert_term(trainer, inputs)


def test_every_loss_type_of_trl_is_tested():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    compared = re.findall(r"self\.loss_type (?:==|!=|in) (\[[^]]*\]|\"\w+\")", source)
    assert {name for names in compared for name in re.findall(r"\w+", names)} == set(LOSS_TYPES)


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        ({"llds_gate": "response"}, {"gate": "response"}),
        ({"llds_gate": "token"}, {"gate": "token"}),
        ({"llds_normalizer": "preserved"}, {"normalizer": "preserved"}),
        ({"llds_normalizer": "response", "llds_coef": 0.05}, {"normalizer": "response", "coef": 0.05}),
        ({"llds_answer_weight": 0.25}, {"answer_weight": 0.25}),
        ({"llds_warmup_steps": 4}, {"coef": 0.1}),
        ({"gradient_checkpointing": True}, {}),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, {}),
        ({"beta": 0.0, "top_entropy_quantile": 0.5}, {}),
    ],
)
def test_settings_reach_the_objective(tmp_path, options, by_hand):
    trainer, inputs = moved(llds_trainer(tmp_path, max_steps=1, **options))
    assert_term(trainer, inputs, **by_hand)


def test_answer_weight_from_the_searches_of_the_rollout(tmp_path):
    rollout = toy.Canned(failed=(1,))
    trainer, inputs = moved(
        llds_trainer(
            tmp_path, max_steps=1, rollout=rollout, llds_answer_weight="auto", llds_answer_searches=4.0
        )
    )
    prompts = toy.dataset()["prompt"][:2]
    searches = [rollout.episode(p, i)["valid_searches"] for p in prompts for i in range(4) if i != 1]
    weight = sum(searches) / len(searches) / 4.0
    assert 0 < weight < 1
    assert float(inputs["llds_answer_weight"]) == pytest.approx(weight)
    assert_term(trainer, inputs, answer_weight=weight)


def test_loss_of_evaluation_is_untouched(tmp_path):
    trainer, inputs = moved(llds_trainer(tmp_path, max_steps=1))
    trainer.model.eval()
    before = trainer.llds.last_step
    with torch.no_grad():
        assert torch.equal(
            trainer.compute_loss(trainer.model, inputs),
            GRPOTrainer.compute_loss(trainer, trainer.model, inputs),
        )
    assert trainer.llds.last_step is before


def trained(tmp_path, cls=LLDSGRPOTrainer, config=LLDSGRPOConfig, policy=None, **overrides):
    trainer = toy.trainer(cls, config(**toy.settings(tmp_path, **overrides)), policy=policy)
    trainer.train()
    return trainer


def assert_same_weights(first, second, atol=0.0):
    other = toy.weights(second)
    for name, p in toy.weights(first).items():
        if atol:
            torch.testing.assert_close(p, other[name], rtol=0, atol=atol)
        else:
            assert torch.equal(p, other[name]), name


def largest_difference(first, second):
    other = toy.weights(second)
    return max(float((p - other[name]).abs().max()) for name, p in toy.weights(first).items())


@pytest.mark.parametrize("options", [{}, {"llds_baseline": "anchor", "llds_anchor_every": 2}])
def test_zero_coefficient_is_plain_grpo_bit_for_bit(tmp_path, options):
    schedule = {"num_iterations": 4, "max_steps": 8, "optim": "adamw_torch", "learning_rate": 1e-2}
    plain = trained(tmp_path, GRPOTrainer, GRPOConfig, **schedule)
    off = trained(tmp_path, llds_coef=0.0, **schedule, **options)
    assert_same_weights(plain, off)
    assert off.llds_status.kind == "off"
    # Its metrics are there all the same, and with a coefficient the weights do change.
    assert off.llds.last_step.metrics["llds/displacement_wrong"] != 0
    assert largest_difference(trained(tmp_path, **schedule, **options), plain) > 1e-4


# A higher rate would blow rounding up: plain GRPO too then differs by 4e-5 after eight steps.
ACTIVE = {"num_iterations": 4, "max_steps": 8, "learning_rate": 0.05, "llds_coef": 1.0}


@pytest.mark.parametrize("normalizer", ["all", "preserved", "response"])
def test_gradient_accumulation_does_not_change_the_weights(tmp_path, normalizer):
    whole = trained(tmp_path, llds_normalizer=normalizer, **ACTIVE)
    parts = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 4
    }  # fmt: skip
    split = trained(tmp_path, llds_normalizer=normalizer, **ACTIVE, **parts)
    assert whole.llds.verdicts["active"] >= 1
    assert largest_difference(whole, trained(tmp_path, **ACTIVE | {"llds_coef": 0.0})) > 1e-4
    assert_same_weights(whole, split, atol=1e-6)
    metrics = whole.llds.last_step.metrics | {"llds/micro_batches": 4.0}
    assert split.llds.last_step.metrics == pytest.approx(metrics, abs=1e-5)


@pytest.mark.parametrize(
    ("accumulation", "per_generation", "micro_batches"),
    [
        (2, 4, [2, 2, 2, 2]),
        # Two rollouts of three micro-batches in an epoch: its last optimizer step is a short one.
        (4, 3, [4, 2, 4, 2]),
    ],
)
def test_each_optimizer_step_has_its_own_normaliser(tmp_path, accumulation, per_generation, micro_batches):
    """Slices of one rollout differ in length, and so do optimizer steps."""
    trainer = llds_trainer(
        tmp_path,
        max_steps=4,
        learning_rate=0.2,
        num_iterations=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
    )
    records, counts = [], []
    trainer.llds.step_hooks.append(records.append)
    trainer.llds.observers.append(lambda *arrays: counts.append(int(arrays[3].sum())))
    trainer.train()
    assert [record.sums["batches"] for record in records] == micro_batches
    bounds = [sum(micro_batches[:i]) for i in range(5)]
    tokens = [sum(counts[a:b]) for a, b in itertools.pairwise(bounds)]
    assert [record.sums["tokens"] for record in records] == tokens
    assert len(set(tokens)) > 1
    assert trainer.llds.verdicts["active"] >= 1
    for record in records:
        expected = 0.2 * record.sums["penalty_sum"] / record.sums["tokens"]
        assert record.metrics["llds/loss"] == pytest.approx(expected, rel=1e-5)


def test_optimizer_batch_over_two_rollouts_is_normalised_rollout_by_rollout(tmp_path):
    """The second rollout's tokens are not known while the first one's gradient is taken."""
    schedule = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1}
    trainer = llds_trainer(
        tmp_path, max_steps=6, learning_rate=0.3, llds_baseline="anchor", llds_anchor_every=3, **schedule
    )
    parts = []
    trainer.llds.observers.append(lambda *arrays: parts.append((int(arrays[3].sum()), *arrays[:4])))
    seen = []
    trainer.llds.step_hooks.append(seen.append)
    trainer.train()
    both_act = []
    for step, record in enumerate(seen):
        window = parts[4 * step : 4 * step + 4]
        halves = window[:2], window[2:]
        tokens = [sum(part[0] for part in half) for half in halves]
        assert tokens[0] != tokens[1]
        terms = [
            sum(float(llds_loss(*part[1:], token_count=2 * count).loss) for part in half)
            for half, count in zip(halves, tokens, strict=True)
        ]
        both_act.append(min(terms) > 1e-4)
        assert record.metrics["llds/loss"] == pytest.approx(sum(terms), rel=1e-5)
    assert any(both_act)


def test_peft_trains_the_adapter_with_the_term(tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)

    def run(coef, baseline="old"):
        config = LLDSGRPOConfig(
            **toy.settings(tmp_path, **ACTIVE | {"llds_coef": coef, "llds_baseline": baseline})
        )
        trainer = toy.trainer(LLDSGRPOTrainer, config, peft_config=lora)
        trainer.train()
        return trainer

    off, on, anchored = run(0.0), run(1.0), run(1.0, "anchor")
    assert on.llds.verdicts["active"] >= 1
    assert largest_difference(on, off) > 1e-4
    assert largest_difference(anchored, off) > 1e-4
    held = [name for name in anchored.llds.anchor.state_dict() if "lora" not in name]
    assert held == ["llds.lagged_anchor.steps"]
    frozen = {name: p for name, p in toy.weights(on).items() if "lora" not in name}
    assert all(torch.equal(p, toy.weights(off)[name]) for name, p in frozen.items())


def test_reference_baseline_measures_from_the_reference(tmp_path):
    policy = toy.model()
    policy.save_pretrained(tmp_path / "start")
    policy.config._name_or_path = str(tmp_path / "start")
    trainer = llds_trainer(
        tmp_path,
        policy=policy,
        beta=0.01,
        llds_baseline="reference",
        num_iterations=1,
        max_steps=3,
        learning_rate=0.2,
    )
    seen, records = [], []
    trainer.llds.observers.append(lambda *arrays: seen.append(arrays))
    trainer.llds.step_hooks.append(records.append)
    trainer.train()
    for _, old, _, _, inputs in seen:
        assert torch.equal(old, inputs["ref_per_token_logps"])
        assert "old_per_token_logps" not in inputs
    # The policy begins as the reference, so the first zero had to be.
    assert [record.verdict for record in records] == ["structural zero", "active", "active"]


def test_anchor_trails_the_policy(tmp_path):
    """Strictly on-policy, every second step refreshed: the baseline is the policy 1, 2, 1, 2 … steps ago."""
    trainer = llds_trainer(
        tmp_path,
        num_iterations=1,
        max_steps=5,
        learning_rate=0.1,
        llds_baseline="anchor",
        llds_anchor_every=2,
    )
    policies, seen, records = [], [], []
    trainer.llds.observers.append(lambda *arrays: seen.append(arrays))
    trainer.llds.observers.append(
        lambda *arrays: policies.append({k: p.clone() for k, p in toy.weights(trainer).items()})
    )
    trainer.llds.step_hooks.append(records.append)
    trainer.train()
    anchored_at = [0, 0, 0, 2, 2]
    for (_, old, _, _, inputs), at in zip(seen, anchored_at, strict=True):
        now = toy.weights(trainer)
        trainer.model.load_state_dict(policies[at], strict=False)
        with torch.no_grad():
            expected, _ = second_forward(trainer, inputs)
        real = inputs["completion_mask"].bool()
        torch.testing.assert_close(old[real], expected[real], rtol=0, atol=1e-5)
        trainer.model.load_state_dict(now, strict=False)
    assert [r.verdict == "structural zero" for r in records] == [True, False, False, False, False]
    assert trainer.llds.verdicts["active"] >= 3


def test_gradient_of_the_term_with_an_anchor(tmp_path):
    """The weights that are exchanged for the anchor's pass are back before the gradient is taken."""
    trainer, inputs = moved(llds_trainer(tmp_path, max_steps=1, num_iterations=1, llds_baseline="anchor"))
    with trainer.llds.anchor.applied():
        anchored, _ = second_forward(trainer, inputs)
    assert_term(trainer, {**inputs, "old_per_token_logps": anchored.detach()})


def test_attach_gives_the_same_training_as_the_trainer_class(tmp_path):
    plain = toy.trainer(GRPOTrainer, GRPOConfig(**toy.settings(tmp_path, num_iterations=4, max_steps=8)))
    attach_llds(plain, coef=1.0)
    plain.train()
    assert_same_weights(plain, trained(tmp_path, **ACTIVE))


def test_estimated_normaliser_is_told(tmp_path, caplog):
    class Copying(LLDSGRPOTrainer):
        def _prepare_inputs(self, batch):
            return dict(super()._prepare_inputs(batch))

    trainer = llds_trainer(tmp_path, cls=Copying, max_steps=2)
    with caplog.at_level(logging.WARNING, "llds.engines.trl"):
        trainer.train()
    assert caplog.text.count("normaliser is estimated") == 1
