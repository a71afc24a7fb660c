"""One run of the laboratory: rollouts, updates, and one row of numbers per rollout.

A small loop of its own in place of TRL's: a run is hundreds of updates of milliseconds each, and a trainer's
own work per step would be many times that (``benchmarks/bench_lab.py``). A run depends on regime, arm and
seed alone; nothing of it survives the process but its rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llds.dynamics import (
    CoefControl,
    Event,
    Measure,
    PhaseMonitor,
    StepAccumulator,
    compare_first_searches,
    controlled_coef,
    hidden_similarity,
    mean_hidden,
    read_series,
)
from llds.lab.arms import Arm
from llds.lab.organism import Organism, Scores, score, score_by_length
from llds.lab.regimes import Regime
from llds.lab.rollouts import Rollout, roll_out
from llds.lab.update import Batch, Losses, losses, shared_prefix
from llds.lab.world import PROMPT_LENGTH, World
from llds.objective import LaggedAnchor, answer_weight_from_searches, grpo_advantages

Row = dict[str, float | None]


@dataclass(frozen=True)
class RunResult:
    """``rows``: one per rollout. ``events``: what the phase monitor said; its steps are rollouts."""

    rows: list[Row]
    events: list[Event]


class Run:
    """A run under way; :meth:`finish` it, or call :meth:`advance` once per rollout."""

    def __init__(self, regime: Regime, arm: Arm, seed: int, start: Organism) -> None:
        self.regime, self.arm = regime, arm
        self.world = World(regime.task)
        self.reference = start
        self.model = copy.deepcopy(start)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=regime.lr, weight_decay=regime.weight_decay, fused=True
        )
        self.anchor = LaggedAnchor(self.model, arm.anchor_every) if arm.baseline == "anchor" else None
        self.coef = arm.coef
        self.monitor = PhaseMonitor()
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self._draw = np.random.default_rng([seed, 2])
        self._sampling = torch.Generator().manual_seed(1_000_003 * seed + 17)
        self._measure = Measure(gate=arm.gate, dead_zone=arm.dead_zone)

    def finish(self, told: Callable[[Row], None] = lambda row: None) -> RunResult:
        """Go on to the last rollout; ``told`` gets every row."""
        while len(self.rows) < self.regime.rollouts:
            told(self.advance())
        return RunResult(self.rows, self.events)

    def advance(self) -> Row:
        """Make one rollout, learn from it, and return its row."""
        regime = self.regime
        questions = self.world.ask(regime.questions, self._draw)
        rollout = roll_out(
            self.model, self.world, questions, regime.group_size, regime.limits, self._sampling, self._draw
        )
        batch, scores = self._batch(rollout)
        behaviour = _behaviour(rollout, batch, scores)
        order = torch.from_numpy(self._draw.permutation(len(rollout.rewards)))
        self._set_lr()
        done = [
            self._update(batch.rows(chosen), age) for age, chosen in enumerate(order.chunk(regime.updates))
        ]
        row: Row = {"rollout": float(len(self.rows)), **behaviour, **_summed(done), "coef": self.coef}
        self.events += self.monitor.update(len(self.rows), monitored(row, regime.updates))
        self.rows.append(row | {"phase": float(self.monitor.phase)})
        return self.rows[-1]

    @torch.no_grad()
    def _batch(self, rollout: Rollout) -> tuple[Batch, Scores]:
        """Turn a rollout into what is learnt from."""
        lengths = (rollout.mask * torch.arange(1, rollout.mask.shape[1] + 1)).amax(1)
        old = score_by_length(self.model, rollout.ids, lengths, PROMPT_LENGTH)
        size = self.regime.group_size
        advantages = grpo_advantages(rollout.rewards, size)
        credit = torch.ones_like(old.logprobs)
        if self.arm.spare_prefix:
            spared = shared_prefix(rollout.ids[:, PROMPT_LENGTH:], rollout.rewards, size)
            credit = credit.masked_fill(spared, 0)
        if self.arm.spare_wrong:
            credit = credit.masked_fill(advantages.unsqueeze(1) < 0, 0)
        groups = [row // size for row in range(len(rollout.rewards))]
        shared = compare_first_searches(rollout.first_query, advantages.tolist(), groups)
        batch = Batch(
            rollout.ids,
            rollout.mask,
            rollout.answer_mask,
            advantages,
            credit,
            old.logprobs,
            score_by_length(self.reference, rollout.ids, lengths, PROMPT_LENGTH).logprobs,
            torch.tensor(shared),
            answer_weight_from_searches(
                rollout.searches - rollout.malformed, self.arm.answer_searches or 2.0
            ),
        )
        return batch, old

    def _set_lr(self) -> None:
        warm = min(1.0, (len(self.rows) + 1) / self.regime.warmup) if self.regime.warmup else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.regime.lr * self.arm.lr_factor * warm

    def _update(self, batch: Batch, age: int) -> tuple[Tensor, Row]:
        """Make one optimizer step; return the sums of its series, and its other numbers."""
        held = self._held_logprobs(batch)
        scores = score(self.model, batch.ids, PROMPT_LENGTH, entropy_gradient=self.arm.entropy > 0)
        if age == 0:
            # Old and new policy are the same here. Batches of another shape are rounded another way, and
            # LLDS would push with full force against a loss of a millionth of a nat.
            batch = replace(batch, old_logprobs=scores.logprobs.detach())
        made = losses(self.arm, batch, scores.logprobs, scores.entropies, coef=self.coef, held_logprobs=held)
        self.optimizer.zero_grad()
        made.total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.regime.max_grad_norm)
        if self.anchor is not None:
            self.anchor.before_step()
        self.optimizer.step()
        sums = self._measured(batch, scores, age)
        if self.arm.control:
            lost = read_series(sums)["displacement_correct"] if age else None
            self.coef = controlled_coef(self.coef, lost, CoefControl())
        return sums, _numbers(made, float(norm))

    def _held_logprobs(self, batch: Batch) -> Tensor | None:
        if self.arm.baseline == "ref":
            return batch.ref_logprobs
        if self.anchor is None:
            return None
        with self.anchor.applied():
            return score(self.model, batch.ids, PROMPT_LENGTH).logprobs

    def _measured(self, batch: Batch, scores: Scores, age: int) -> Tensor:
        accumulator = StepAccumulator(self._measure)
        accumulator.add(
            scores.logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.mask,
            answer_mask=batch.answer_mask,
            entropies=scores.entropies,
            first_search=batch.first_search,
            updates=age,
        )
        return accumulator.sums()


def monitored(row: Mapping[str, float | None], updates: int) -> Row:
    """Return what the phase monitor is shown of a rollout with ``updates`` optimizer steps.

    One row a rollout, for reward and conduct are measured once a rollout: repeated, they would look as if
    they had no noise.
    """
    return {**row, "updates_since_rollout": (updates - 1) / 2}


def _behaviour(rollout: Rollout, batch: Batch, scores: Scores) -> Row:
    """Return what the policy did in a rollout."""
    right, wrong = batch.advantages > 1e-3, batch.advantages < -1e-3
    similarity = hidden_similarity(mean_hidden(scores.hidden, rollout.mask), right, wrong).item()
    searches = rollout.searches.sum().item()
    return {
        "reward": rollout.rewards.mean().item(),
        "searches": rollout.searches.double().mean().item(),
        "malformed": rollout.malformed.sum().item() / searches if searches else None,
        "answered": rollout.answered.double().mean().item(),
        "action_tokens": rollout.mask.sum(1).double().mean().item(),
        "responses_neutral": (~(right | wrong)).double().mean().item(),
        "hidden_similarity": None if np.isnan(similarity) else similarity,
    }


def _numbers(made: Losses, norm: float) -> Row:
    return {
        "grad_norm": norm,
        "kl": made.kl.metrics["kl"].item(),
        "clip_share": made.policy.metrics["clip_share"].item(),
        "llds_loss": made.llds.loss.item(),
    }


#: The series of :data:`llds.dynamics.SERIES` that are kept, each over all updates of a rollout.
KEPT = (
    *(f"{kind}_{sign}" for kind in ("logprob", "displacement") for sign in ("correct", "neutral", "wrong")),
    *("displacement_correct_first", "displacement_wrong_first", "displacement_correct_answer"),
    *("lld_actions_correct", "lld_responses_correct"),
    *("gate_rate", "preserved_share", "penalised_share", "penalty"),
    *("nll_round_0", "nll_round_1", "nll_round_2"),
    *("first_search_shared", "ratio_spikes", "policy_entropy"),
)


def _summed(done: Sequence[tuple[Tensor, Row]]) -> Row:
    """Return the series over all updates of a rollout, and the means of the other numbers."""
    series = read_series(torch.stack([sums for sums, _ in done]).sum(0))
    rows: list[dict[str, Any]] = [numbers for _, numbers in done]
    means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    return (
        {name: series[name] for name in KEPT} | means | {"grad_norm_max": max(r["grad_norm"] for r in rows)}
    )
