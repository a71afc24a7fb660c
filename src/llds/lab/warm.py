"""The supervised start: the organism learns the protocol from demonstrations, of which some go wrong.

A demonstration thinks, looks up one relation after the other, and answers. One that goes wrong stops early,
looks up the wrong relation, or answers at random, so the start is as far from the optimum as one likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from llds.lab.organism import Body, Organism, score
from llds.lab.world import (
    ANSWER,
    ANSWER_END,
    INFO,
    INFO_END,
    PAD,
    PROMPT_LENGTH,
    SEARCH,
    SEARCH_END,
    THINK,
    Questions,
    World,
)
from llds.objective.checks import check_above, check_least

#: Ways to think before a search, and as many before an answer; each is two words that go together.
_PHRASES = 4


@dataclass(frozen=True)
class Start:
    """How the organism is started.

    ``wrong``: share of demonstrations that go wrong. ``steps``, ``batch``, ``lr``: of the supervised training
    with AdamW, whose learning rate rises over a tenth of the steps and falls to a tenth. ``seed``: of weights
    and demonstrations.
    """

    wrong: float = 0.5
    steps: int = 500
    batch: int = 64
    lr: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(0.0, wrong=self.wrong)
        check_least(1, steps=self.steps, batch=self.batch)
        check_above(0.0, lr=self.lr)


def warm_start(
    world: World, body: Body, start: Start, told: Callable[[int], None] = lambda done: None
) -> Organism:
    """Train an organism on demonstrations; ``told`` is called with the steps that are done."""
    torch.manual_seed(start.seed)
    draw = np.random.default_rng([start.seed, 1])
    model = Organism(world.vocabulary_size, body)
    optimizer = torch.optim.AdamW(model.parameters(), lr=start.lr, weight_decay=0.0, fused=True)
    for step in range(start.steps):
        for group in optimizer.param_groups:
            group["lr"] = start.lr * min(1.0, 10 * (step + 1) / start.steps) * (1 - 0.9 * step / start.steps)
        ids, mask = demonstrations(world, world.ask(start.batch, draw), start.wrong, draw)
        logprobs = score(model, ids, PROMPT_LENGTH).logprobs
        loss = -(logprobs * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        told(step + 1)
    return model


def demonstrations(
    world: World, questions: Questions, wrong: float, draw: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one demonstration per question: ids [B, P + T], and the mask [B, T] of what it teaches."""
    shown = [_demonstration(world, questions, row, wrong, draw) for row in range(len(questions))]
    length = max(len(ids) for ids, _ in shown)
    ids, mask = (
        np.array([[*part[kind], *[PAD] * (length - len(part[kind]))] for part in shown]) for kind in (0, 1)
    )
    prompts = world.prompts(questions)
    return torch.from_numpy(np.concatenate([prompts, ids], axis=1)), torch.from_numpy(mask)


def _demonstration(
    world: World, questions: Questions, row: int, wrong: float, draw: np.random.Generator
) -> tuple[list[int], list[int]]:
    goes_wrong = draw.random() < wrong
    hops = [int(r) for r in (questions.inner[row], questions.outer[row]) if r >= 0]
    steps = int(draw.integers(len(hops) + 1)) if goes_wrong else len(hops)
    entity = int(questions.entity[row])
    ids: list[int] = []
    mask: list[int] = []
    for relation in hops[:steps]:
        if goes_wrong and draw.random() < 0.3:
            relation = int(draw.integers(world.task.relations))
        query = [world.first_relation + relation, world.first_entity + entity]
        action = [*_thought(world, 0, draw), SEARCH, *query, SEARCH_END]
        entity = int(world.facts[relation, entity])
        feedback = [INFO, world.first_entity + entity, INFO_END]
        ids += action + feedback
        mask += [1] * len(action) + [0] * len(feedback)
    if goes_wrong and draw.random() < 0.5:
        entity = int(draw.integers(world.task.entities))
    answer = [*_thought(world, 1, draw), ANSWER, world.first_entity + entity, ANSWER_END]
    return ids + answer, mask + [1] * len(answer)


def _thought(world: World, kind: int, draw: np.random.Generator) -> list[int]:
    """Return a thought before a search (``kind`` 0) or an answer (1)."""
    word = 2 * (int(draw.integers(_PHRASES)) + kind * _PHRASES)
    return [THINK, *(world.first_word + (word + i) % world.task.words for i in range(2))]
