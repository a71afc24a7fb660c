"""One run: the same seed gives the same numbers, and every arm does what its name says."""

from dataclasses import replace

import pytest
import torch

from llds.dynamics import SERIES
from llds.errors import LLDSError
from llds.lab.arms import ARMS, Arm
from llds.lab.loop import KEPT, Run
from llds.lab.organism import Body
from llds.lab.regimes import Regime, every_regime
from llds.lab.warm import Start, warm_start
from llds.lab.world import Task, World

REGIME = Regime(
    "small",
    task=Task(entities=6, relations=2, two_hop=0.0, noise=0.2),
    body=Body(layers=1, width=32, heads=1),
    start=Start(wrong=0.3, steps=150, batch=48, lr=5e-3),
    questions=8,
    group_size=4,
    updates=4,
    rollouts=5,
    lr=3e-3,
    warmup=2,
)


@pytest.fixture(scope="module")
def start():
    return warm_start(World(REGIME.task), REGIME.body, REGIME.start)


def made(start, arm=ARMS["llds"], seed=0, **changes):
    run = Run(replace(REGIME, **changes), arm, seed, start)
    run.finish()
    return run


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_a_run_is_its_seed(start):
    before = [p.clone() for p in start.parameters()]
    first, again, other = made(start), made(start), made(start, seed=1)
    assert first.rows == again.rows
    assert torch.equal(weights(first), weights(again))
    assert first.rows != other.rows
    assert all(torch.equal(p, q) for p, q in zip(before, start.parameters(), strict=True))


def test_what_a_row_holds(start):
    rows = made(start).rows
    assert [row["rollout"] for row in rows] == [0, 1, 2, 3, 4]
    assert set(KEPT) <= rows[0].keys() & SERIES.keys()
    first = rows[0]
    assert 0.1 < first["reward"] < 1
    assert first["kl"] >= 0
    assert first["coef"] == 0.2
    assert rows[-1]["kl"] > first["kl"]
    assert 0 < first["action_tokens"] <= 40
    assert all(row["displacement_correct"] != 0 for row in rows)


def test_learning_learns(start):
    """Without noise and with a gentle rate GRPO does what it is for."""
    task = replace(REGIME.task, noise=0.0)
    rows = made(start, ARMS["grpo"], task=task, rollouts=40, lr=1e-3, questions=16).rows
    reward = [row["reward"] for row in rows]
    assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.1


def test_a_rate_of_nearly_nothing_changes_nearly_nothing(start):
    run = made(start, lr=1e-9, weight_decay=0.0)
    torch.testing.assert_close(weights(run), torch.cat([p.flatten() for p in start.parameters()]))
    assert all(abs(row["displacement_correct"]) < 1e-4 for row in run.rows)


@pytest.mark.parametrize("name", [name for name in ARMS if name != "llds"])
def test_every_arm_goes_its_own_way(start, name):
    assert not torch.equal(weights(made(start, ARMS[name], rollouts=3)), weights(made(start, rollouts=3)))


def test_zero_coefficient_is_plain_grpo(start):
    assert torch.equal(weights(made(start, Arm(coef=0.0, gate="token"))), weights(made(start, ARMS["grpo"])))


def test_half_the_rate_is_half_the_rate(start):
    half = made(start, ARMS["half-lr"], lr=2e-3)
    assert torch.equal(weights(half), weights(made(start, ARMS["grpo"], lr=1e-3)))


def test_control_moves_lambda(start):
    assert {row["coef"] for row in made(start).rows} == {0.2}
    moved = [row["coef"] for row in made(start, ARMS["llds-control"]).rows]
    assert len(set(moved)) == len(moved)
    assert all(0.01 <= coef <= 2 for coef in moved)


def test_the_anchor_trails_the_policy(start):
    """On a single update per rollout old and new are the same, and only the anchor can hold anything."""
    on_policy = {"updates": 1, "rollouts": 6, "lr": 1e-2}
    plain, old, anchored = (
        made(start, replace(ARMS[name], coef=coef), **on_policy)
        for name, coef in (("grpo", 0.0), ("llds", 1.0), ("llds-anchor", 1.0))
    )
    assert torch.equal(weights(plain), weights(old))
    assert not torch.equal(weights(plain), weights(anchored))
    losses = [row["llds_loss"] for row in anchored.rows]
    assert losses[0] == 0
    assert max(losses) > 0


def test_the_start_holds_from_the_first_update_on(start):
    """On a single update per rollout LLDS towards the old policy cannot fire; towards the start it does."""
    on_policy = {"updates": 1, "rollouts": 4, "lr": 1e-2}
    plain = made(start, ARMS["grpo"], **on_policy)
    held = made(start, replace(ARMS["llds-ref"], coef=1.0), **on_policy)
    assert not torch.equal(weights(plain), weights(held))
    losses = [row["llds_loss"] for row in held.rows]
    assert losses[0] < 1e-6
    assert max(losses[1:]) > 1e-4


def test_spared_responses_have_no_part_in_the_policy_loss(start):
    run = Run(REGIME, ARMS["spare-wrong"], 0, start)
    seen = []
    take = run._batch

    def watched(rollout):
        batch, scores = take(rollout)
        seen.append(batch)
        return batch, scores

    run._batch = watched
    for _ in range(3):
        run.advance()
    for batch in seen:
        assert torch.equal(batch.credit.amax(1) == 0, batch.advantages < 0)
        assert torch.equal(batch.credit.amin(1) == 1, batch.advantages >= 0)
    assert any((batch.advantages < 0).any() for batch in seen)


def test_groups_stay_together_in_the_advantages(start):
    run = Run(REGIME, ARMS["grpo"], 0, start)
    seen = []
    take = run._batch

    def watched(rollout):
        batch, scores = take(rollout)
        seen.append((rollout, batch))
        return batch, scores

    run._batch = watched
    run.advance()
    ((rollout, batch),) = seen
    rewards = rollout.rewards.view(-1, REGIME.group_size)
    advantages = batch.advantages.view(-1, REGIME.group_size)
    for group, wanted in zip(rewards, advantages, strict=True):
        scaled = (group - group.mean()) / (group.std() + 1e-4)
        torch.testing.assert_close(wanted, torch.zeros_like(group) if group.std() == 0 else scaled)
    prompts = rollout.ids[:, :5].view(-1, REGIME.group_size, 5)
    assert torch.equal(prompts, prompts[:, :1].expand_as(prompts))


def test_regimes_can_be_run():
    for name, regime in every_regime().items():
        assert regime.questions * regime.group_size % regime.updates == 0, name
        assert regime.body.positions >= 5 + regime.limits.max_response, name
    with pytest.raises(LLDSError, match="cannot be split into 7 updates"):
        replace(REGIME, updates=7)
