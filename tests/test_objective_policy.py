"""Policy losses and KL against the formulas of TRL and verl, token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llds.errors import LLDSError
from llds.objective import grpo_policy_loss, gspo_policy_loss, k3_kl, llds_loss

AGGREGATIONS = ("token-mean", "sequence-mean", "dr_grpo")
NAN = float("nan")


def batch(seed, rows=3, length=7, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=generator, dtype=torch.float64)
    logprobs = old + spread * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=generator) > 0.3
    mask[:, 0] = True
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    return logprobs.requires_grad_(), old, advantages, mask


def aggregate(costs, aggregation, longest=20):
    """Average lists of token costs, one list per response."""
    if aggregation == "token-mean":
        return sum(map(sum, costs)) / sum(map(len, costs))
    if aggregation == "sequence-mean":
        return sum(sum(row) / len(row) for row in costs) / len(costs)
    return sum(map(sum, costs)) / (len(costs) * longest)


def options(aggregation):
    return {
        "aggregation": aggregation,
        "max_response_length": 20 if aggregation == "dr_grpo" else None,
    }


def surrogate(ratio, advantage, low, high):
    clipped = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, clipped * advantage)


def policy_tokens(logprobs, old, mask):
    return [
        [(n, o) for n, o, m in zip(*row, strict=True) if m]
        for row in zip(logprobs.tolist(), old.tolist(), mask.tolist(), strict=True)
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(AGGREGATIONS), st.sampled_from([None, 0.28]))
def test_grpo_is_the_formula(seed, aggregation, clip_high):
    logprobs, old, advantages, mask = batch(seed)
    costs, clipped = [], 0
    for row, advantage in zip(policy_tokens(logprobs, old, mask), advantages.tolist(), strict=True):
        ratios = [math.exp(new - before) for new, before in row]
        costs.append([surrogate(ratio, advantage, 0.2, clip_high or 0.2) for ratio in ratios])
        clipped += sum(ratio > 1 + (clip_high or 0.2) if advantage > 0 else ratio < 0.8 for ratio in ratios)
    output = grpo_policy_loss(logprobs, old, advantages, mask, clip_high=clip_high, **options(aggregation))
    assert output.loss.item() == pytest.approx(aggregate(costs, aggregation), abs=1e-12)
    assert output.metrics["clipped_tokens"] == clipped
    assert output.metrics["tokens"] == mask.sum()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(AGGREGATIONS))
def test_gspo_is_the_formula(seed, aggregation):
    logprobs, old, advantages, mask = batch(seed)
    costs = []
    for row, advantage in zip(policy_tokens(logprobs, old, mask), advantages.tolist(), strict=True):
        ratio = math.exp(sum(new - before for new, before in row) / len(row))
        costs.append([surrogate(ratio, advantage, 0.1, 0.2)] * len(row))
    output = gspo_policy_loss(
        logprobs, old, advantages, mask, clip_low=0.1, clip_high=0.2, **options(aggregation)
    )
    assert output.loss.item() == pytest.approx(aggregate(costs, aggregation), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(AGGREGATIONS), st.sampled_from([None, 0.5, 10.0]))
def test_k3_is_the_formula(seed, aggregation, clamp):
    logprobs, ref, _, mask = batch(seed, spread=1.5)
    costs = [
        [min(math.exp(before - new) - (before - new) - 1, clamp or math.inf) for new, before in row]
        for row in policy_tokens(logprobs, ref, mask)
    ]
    output = k3_kl(logprobs, ref, mask, clamp=clamp, **options(aggregation))
    assert output.loss.item() == pytest.approx(aggregate(costs, aggregation), abs=1e-12)


def test_the_gradient_on_policy_is_the_policy_gradient():
    _, old, advantages, mask = batch(0)
    for loss in (grpo_policy_loss, gspo_policy_loss):
        logprobs = old.clone().requires_grad_()
        (slope,) = torch.autograd.grad(
            loss(logprobs, old, advantages, mask, aggregation="token-mean").loss, logprobs
        )
        expected = -advantages[:, None] * mask / mask.sum()
        torch.testing.assert_close(slope, expected)


def test_a_clipped_token_has_no_gradient():
    old = torch.zeros(1, 4)
    logprobs = torch.tensor([[0.25, 0.15, -0.3, -1.0]]).requires_grad_()
    mask = torch.ones(1, 4)
    for advantage, alive in ((1.0, [False, True, True, True]), (-1.0, [True, True, False, False])):
        output = grpo_policy_loss(logprobs, old, torch.tensor([advantage]), mask)
        (slope,) = torch.autograd.grad(output.loss, logprobs)
        assert (slope != 0).tolist() == [alive]
    higher = grpo_policy_loss(logprobs, old, torch.tensor([1.0]), mask, clip_high=0.3)
    assert torch.autograd.grad(higher.loss, logprobs)[0][0, 0] != 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", [grpo_policy_loss, gspo_policy_loss])
def test_packed_is_padded_and_parts_make_the_whole(loss, aggregation):
    logprobs, old, advantages, mask = batch(5, rows=4)
    chosen = options(aggregation)
    padded = loss(logprobs, old, advantages, mask, **chosen)
    ids = torch.arange(4).repeat_interleave(7)
    flat = [tensor.flatten() for tensor in (logprobs, old)]
    packed = loss(*flat, advantages, mask.flatten(), segment_ids=ids, **chosen)
    count = padded.metrics["tokens" if aggregation == "token-mean" else "responses"]
    parts = zip(*(tensor.split(3) for tensor in (logprobs, old, advantages, mask)), strict=True)
    split = sum(loss(*part, token_count=count, **chosen).loss for part in parts)
    slope = torch.autograd.grad(padded.loss, logprobs)[0]
    for other in (packed.loss, split):
        torch.testing.assert_close(other, padded.loss)
        torch.testing.assert_close(torch.autograd.grad(other, logprobs)[0], slope)


def call(loss, logprobs, old, advantages, mask):
    return loss(logprobs, old, mask) if loss is k3_kl else loss(logprobs, old, advantages, mask)


@pytest.mark.parametrize("loss", [grpo_policy_loss, gspo_policy_loss, k3_kl])
def test_nothing_gets_through_the_mask(loss):
    logprobs, old, advantages, mask = batch(1)
    clean = call(loss, logprobs, old, advantages, mask)
    spoilt = [tensor.detach().masked_fill(~mask, NAN) for tensor in (logprobs, old)]
    spoilt[0].requires_grad_()
    output = call(loss, *spoilt, advantages[:, None].expand(3, 7).masked_fill(~mask, NAN), mask)
    assert output.loss == clean.loss
    torch.testing.assert_close(
        torch.autograd.grad(output.loss, spoilt[0])[0], torch.autograd.grad(clean.loss, logprobs)[0]
    )


@pytest.mark.parametrize("loss", [grpo_policy_loss, gspo_policy_loss, k3_kl])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_a_fault_under_the_mask_is_seen(loss, bad, which):
    logprobs, old, advantages, mask = batch(1)
    with torch.no_grad():
        (logprobs, old)[which][0, 0] = bad
    output = call(loss, logprobs, old, advantages, mask)
    assert output.loss.isnan() or output.loss.isinf()
    assert output.metrics["nonfinite_tokens"] == 1
    assert torch.autograd.grad(output.loss, logprobs)[0][0, 0].isnan()


@pytest.mark.parametrize("loss", [grpo_policy_loss, gspo_policy_loss, k3_kl])
def test_only_the_new_policy_gets_a_gradient(loss):
    logprobs, *others, mask = (tensor.detach() for tensor in batch(6))
    leaves = [tensor.requires_grad_() for tensor in (logprobs, *others)]
    gradients = torch.autograd.grad(call(loss, *leaves, mask).loss, leaves, allow_unused=True)
    assert [gradient is not None for gradient in gradients] == [True, False, False]


def test_a_huge_ratio_stays_finite():
    logprobs = torch.tensor([[0.0, 0.0]], requires_grad=True)
    old, mask = torch.tensor([[-200.0, 200.0]]), torch.ones(1, 2)
    for loss in (
        grpo_policy_loss(logprobs, old, torch.ones(1), mask).loss,
        k3_kl(logprobs, old, mask, clamp=10.0).loss,
    ):
        assert loss.isfinite()
        assert torch.autograd.grad(loss, logprobs)[0].isfinite().all()


def test_a_batch_without_policy_tokens_costs_nothing():
    logprobs = torch.zeros(2, 3, requires_grad=True)
    nothing = torch.zeros(2, 3)
    for loss in (grpo_policy_loss, gspo_policy_loss, k3_kl):
        assert call(loss, logprobs, nothing, torch.ones(2), nothing).loss == 0


def test_a_response_without_policy_tokens_does_not_count():
    logprobs, old, advantages, mask = batch(2)
    mask[1] = False
    output = grpo_policy_loss(logprobs, old, advantages, mask, aggregation="sequence-mean")
    kept = [0, 2]
    fewer = grpo_policy_loss(
        logprobs[kept], old[kept], advantages[kept], mask[kept], aggregation="sequence-mean"
    )
    torch.testing.assert_close(output.loss, fewer.loss)


def test_it_adds_to_llds():
    logprobs, old, advantages, mask = batch(3)
    policy = grpo_policy_loss(logprobs, old, advantages, mask)
    regulariser = llds_loss(logprobs, old, advantages, mask)
    slopes = [
        torch.autograd.grad(output.loss, logprobs, retain_graph=True)[0] for output in (policy, regulariser)
    ]
    (policy.loss + regulariser.loss).backward()
    torch.testing.assert_close(logprobs.grad, slopes[0] + slopes[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregation": "mean"}, "aggregation must be one of 'token-mean', 'sequence-mean', 'dr_grpo'"),
        ({"aggregation": "dr_grpo"}, "max_response_length goes with"),
        ({"max_response_length": 9}, "max_response_length goes with"),
        ({"clip_low": -0.1}, "clip_low must be at least 0"),
        ({"clip_high": NAN}, "clip_high must be at least 0, but is nan"),
        ({"token_count": 0}, "token_count must be at least 1"),
    ],
)
def test_mistakes_are_named(changes, message):
    logprobs, old, advantages, mask = batch(4)
    with pytest.raises(LLDSError, match=message):
        grpo_policy_loss(logprobs, old, advantages, mask, **changes)
    with pytest.raises(LLDSError, match="ref_logprobs must have the shape of logprobs"):
        k3_kl(logprobs, old[:, :3], mask)
