"""The arithmetic of a run: how a rollout is cut into steps and micro-batches, and which questions come
when.

Everything here depends on the recipe alone, never on what happened before, so a resumed run sees the same
numbers.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from llds.errors import LLDSError
from llds.training.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """Sizes of a run on ``processes`` processes.

    ``micro_batch``: responses per forward pass and process. ``accumulation``: micro-batches per optimizer
    step. ``slices``: micro-batches per pass over a rollout. ``steps_per_rollout``: optimizer steps per
    rollout, all passes together. ``total_steps``: optimizer steps of the run.
    """

    processes: int
    micro_batch: int
    accumulation: int
    slices: int
    steps_per_rollout: int
    total_steps: int

    def rollout(self, step: int) -> int:
        """Return the index of the rollout that follows ``step`` finished optimizer steps."""
        return step // self.steps_per_rollout

    def at_boundary(self, step: int) -> bool:
        """Say whether ``step`` finished optimizer steps are a whole number of rollouts."""
        return step % self.steps_per_rollout == 0


def make_plan(recipe: Recipe, processes: int = 1) -> Plan:
    """Cut the rollouts of ``recipe`` for ``processes`` processes.

    The micro-batch is the largest one not above ``grpo.micro_batch`` that cuts a step evenly. Raises
    :class:`LLDSError` when a rollout can't be divided among steps and processes.
    """
    grpo = recipe.grpo
    total = grpo.questions * grpo.responses
    parts = grpo.steps_per_rollout * processes
    if total % parts:
        raise LLDSError(
            f"grpo.questions × grpo.responses = {total} can't be divided into grpo.steps_per_rollout × "
            f"processes = {grpo.steps_per_rollout} × {processes} equal parts; change one of them."
        )
    share = total // parts
    micro = max(size for size in range(1, min(grpo.micro_batch, share) + 1) if share % size == 0)
    accumulation = share // micro
    steps = grpo.steps_per_rollout * grpo.passes
    return Plan(
        processes,
        micro,
        accumulation,
        accumulation * grpo.steps_per_rollout,
        steps,
        steps * recipe.run.rollouts,
    )


def check_enough(count: int, recipe: Recipe) -> None:
    """Raise :class:`LLDSError` when ``count`` training questions are fewer than one rollout needs."""
    if count < recipe.grpo.questions:
        raise LLDSError(
            f"There are {count} training questions, fewer than one rollout takes: "
            f"grpo.questions = {recipe.grpo.questions}."
        )


def question_order(count: int, recipe: Recipe) -> list[int]:
    """Return the indices of the questions of all rollouts, in order: every question once before any comes
    again.

    ``count``: number of training questions. Each pass over them has its own seeded order. Raises
    :class:`LLDSError` when there are fewer questions than one rollout needs.
    """
    check_enough(count, recipe)
    needed = recipe.grpo.questions * recipe.run.rollouts
    order: list[int] = []
    for index in range(-(-needed // count)):
        shuffled = list(range(count))
        random.Random(seed_of(recipe.run.seed, "order", index)).shuffle(shuffled)
        order += shuffled
    return order[:needed]


def rollout_seed(seed: int, use: str, rollout: int, process: int, attempt: int) -> int:
    """Return the seed of a rollout for one use of random numbers on one process.

    ``attempt``: how often the run went back to a checkpoint. The seed depends on it, or what follows a
    rollback would be the same again.
    """
    again = (attempt,) if attempt else ()
    return seed_of(seed, use, rollout, process, *again)


def seed_of(*parts: object) -> int:
    """Return a seed below 2**32 that depends on every part, as (run seed, rollout index, process)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:4], "big")
