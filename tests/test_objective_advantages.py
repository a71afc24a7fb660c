"""Group-relative advantages."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llds.errors import LLDSError
from llds.objective import answer_weight_from_searches, authors_answer_weight, grpo_advantages, llds_loss

REWARDS = st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]), min_size=2, max_size=5)


def expected(group, scale, eps=1e-4):
    mean, std = statistics.fmean(group), statistics.stdev(group)
    return [(r - mean) / (std + eps if scale == "std" else 1) if len(set(group)) > 1 else 0.0 for r in group]


@settings(deadline=None, max_examples=50)
@given(st.lists(REWARDS, min_size=1, max_size=4), st.sampled_from(["std", "none"]), st.randoms())
def test_groups_in_any_order_follow_the_formula(groups, scale, random):
    rows = [
        (7 - 3 * i, r, a)
        for i, group in enumerate(groups)
        for r, a in zip(group, expected(group, scale), strict=True)
    ]
    random.shuffle(rows)
    ids, rewards, advantages = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    actual = grpo_advantages(rewards, groups=ids.long(), scale=scale)
    torch.testing.assert_close(actual, advantages)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), st.integers(1, 3))
def test_rows_in_turn_are_a_group(group, repeats):
    rewards = torch.tensor(group * repeats)
    ids = torch.arange(repeats).repeat_interleave(4)
    by_size = grpo_advantages(rewards, 4)
    assert torch.equal(by_size, grpo_advantages(rewards, groups=ids))
    torch.testing.assert_close(by_size, torch.tensor(expected(group, "std") * repeats))


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1e4 / 7])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_give_exactly_zero(reward, scale):
    rewards = torch.full((8,), reward)
    plain = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert not grpo_advantages(rewards, 8, scale=scale, eps=1e-6).any()
    if reward in (0.1, 0.7):
        assert plain.any(), "the plain formula is no longer off by a rounding error"


def test_rewards_that_differ_by_rounding_are_equal():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.6 / 2], dtype=torch.float64)
    assert rewards.unique().numel() > 1
    assert not grpo_advantages(rewards, 4).any()


def test_a_row_that_is_off_has_no_part_in_its_group():
    rewards = torch.tensor([1.0, 0.0, float("nan"), 1.0])
    valid = torch.tensor([True, True, False, True])
    actual = grpo_advantages(rewards, 4, valid=valid)
    assert actual[2] == 0
    torch.testing.assert_close(actual[valid], grpo_advantages(rewards[valid], 3))


def test_a_reward_that_is_not_a_number_spoils_its_group_alone():
    advantages = grpo_advantages(torch.tensor([1.0, float("nan"), 0.0, 1.0]), 2)
    assert advantages.isnan().tolist() == [True, True, False, False]
    logprobs, mask = torch.zeros(4, 2), torch.ones(4, 2)
    assert llds_loss(logprobs, logprobs, advantages, mask).metrics["nonfinite_tokens"] == 4


def test_a_group_of_one_and_no_group_at_all():
    assert grpo_advantages(torch.tensor([3.0, 4.0]), 1).tolist() == [0.0, 0.0]
    assert grpo_advantages(torch.zeros(0), 4).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype):
    actual = grpo_advantages(torch.tensor([1, 0, 0, 1], dtype=dtype), 4)
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert actual.tolist() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of group_size and groups"),
        ({"group_size": 2, "groups": torch.zeros(6)}, "exactly one of group_size and groups"),
        ({"group_size": 4}, "6 rewards cannot be split into groups of 4"),
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"groups": torch.zeros(5)}, r"groups must have the shape of rewards, \[6\], but has \[5\]"),
        ({"group_size": 2, "valid": torch.ones(2)}, "valid must have the shape of rewards"),
        ({"group_size": 2, "scale": "batch"}, "scale must be one of 'std', 'none'"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(LLDSError, match=message):
        grpo_advantages(torch.zeros(6), **arguments)


def test_answer_weight_is_equation_5():
    assert answer_weight_from_searches(torch.tensor([1, 0, 2, 1])) == 0.5
    assert answer_weight_from_searches(torch.tensor([3, 4])) == 1
    assert answer_weight_from_searches(torch.tensor(1.0), target=4.0) == 0.25
    with pytest.raises(LLDSError, match="target must be above 0"):
        answer_weight_from_searches(torch.tensor(1.0), target=0.0)


def test_the_authors_answer_weight():
    counts = torch.tensor([1.0, 2.0])
    assert authors_answer_weight(counts, coef=0.2, mask_weight=0.1).item() == pytest.approx(0.25)
    assert authors_answer_weight(counts, coef=0.2, mask_weight=1.0).item() == pytest.approx(1.0)
    assert authors_answer_weight(torch.tensor(0.5), coef=0.2, mask_weight=1.0) == 0
