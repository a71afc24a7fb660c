"""A world small enough to know by heart: people, relations between them, questions, and a tool that looks up.

A question asks for the end of one or two relations ("who is the mentor of the city of e17?"). The policy may
look up one relation of one entity at a time, and gives its answer as an entity. Everything is a token id; no
text is parsed. Where the tool is noisy, right actions end in wrong answers: the condition of arXiv 2512.04220.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llds.errors import LLDSError
from llds.objective.checks import check_least

Ids = NDArray[np.int64]

SPECIALS = ("<pad>", "<q>", "-", "?", "<think>", "<search>", "</search>", "<info>", "</info>", "nothing",
            "<answer>", "</answer>")  # fmt: skip
PAD, QUESTION, NO_HOP, MARK, THINK, SEARCH, SEARCH_END, INFO, INFO_END, NOTHING, ANSWER, ANSWER_END = range(
    len(SPECIALS)
)
#: Tokens of every prompt: ``<q> outer inner entity ?``, where outer is ``-`` in a question of one hop.
PROMPT_LENGTH = 5
#: Tokens of every feedback: ``<info> entity </info>``.
FEEDBACK_LENGTH = 3


@dataclass(frozen=True)
class Task:
    """What is asked, and how far the tool can be trusted.

    ``entities``, ``relations``, ``words``: sizes of the vocabulary; words are for thinking aloud.
    ``two_hop``: share of questions with two hops. ``noise``: share of well-formed searches that return a
    random entity. ``ambiguity``: share of facts with two values, of which the tool returns either, while the
    question accepts one. ``world_seed``: which world.
    """

    entities: int = 96
    relations: int = 4
    words: int = 16
    two_hop: float = 2 / 3
    noise: float = 0.4
    ambiguity: float = 0.0
    world_seed: int = 0

    def __post_init__(self) -> None:
        check_least(2, entities=self.entities, relations=self.relations, words=self.words)
        for name in ("two_hop", "noise", "ambiguity"):
            if not 0 <= getattr(self, name) <= 1:
                raise LLDSError(f"{name} is a share, from 0 to 1, but is {getattr(self, name)}.")


@dataclass(frozen=True)
class Questions:
    """Questions as arrays [Q]: the relation to follow first and second (−1 without), the entity, the answer."""

    inner: Ids
    outer: Ids
    entity: Ids
    gold: Ids

    def __len__(self) -> int:
        return len(self.entity)


class World:
    """The facts, and the tool that tells them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        draw = np.random.default_rng([task.world_seed, 0])
        shape = (task.relations, task.entities)
        self.facts = draw.integers(0, task.entities, shape)
        self._second = draw.integers(0, task.entities, shape)
        self._is_ambiguous = draw.random(shape) < task.ambiguity

    @property
    def first_relation(self) -> int:
        """Token id of the first relation."""
        return len(SPECIALS)

    @property
    def first_word(self) -> int:
        """Token id of the first word."""
        return self.first_relation + self.task.relations

    @property
    def first_entity(self) -> int:
        """Token id of the first entity; entities are the last ids."""
        return self.first_word + self.task.words

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self.first_entity + self.task.entities

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """What each token id stands for."""
        sizes = (("r", self.task.relations), ("w", self.task.words), ("e", self.task.entities))
        return (*SPECIALS, *(f"{kind}{i}" for kind, size in sizes for i in range(size)))

    def ask(self, count: int, draw: np.random.Generator) -> Questions:
        """Draw ``count`` questions."""
        entity = draw.integers(0, self.task.entities, count)
        inner = draw.integers(0, self.task.relations, count)
        outer = draw.integers(0, self.task.relations, count)
        outer[draw.random(count) >= self.task.two_hop] = -1
        middle = self.facts[inner, entity]
        relation, subject = np.where(outer < 0, inner, outer), np.where(outer < 0, entity, middle)
        takes_second = self._is_ambiguous[relation, subject] & (draw.random(count) < 0.5)
        gold = np.where(takes_second, self._second[relation, subject], self.facts[relation, subject])
        return Questions(inner, outer, entity, gold)

    def prompts(self, questions: Questions) -> Ids:
        """Return the prompts as token ids, [Q, PROMPT_LENGTH]."""
        outer = np.where(questions.outer < 0, NO_HOP, self.first_relation + questions.outer)
        columns = (
            np.full(len(questions), QUESTION),
            outer,
            self.first_relation + questions.inner,
            self.first_entity + questions.entity,
            np.full(len(questions), MARK),
        )
        return np.stack(columns, axis=1)

    def look_up(self, relation: int, entity: int, draw: np.random.Generator) -> int:
        """Return the token of what the tool finds for token ids ``relation`` and ``entity``.

        A query that is not one relation and one entity finds nothing, so there is nothing to gain by it.
        """
        r, e = relation - self.first_relation, entity - self.first_entity
        if not (0 <= r < self.task.relations and 0 <= e < self.task.entities):
            return NOTHING
        if draw.random() < self.task.noise:
            return self.first_entity + int(draw.integers(self.task.entities))
        takes_second = bool(self._is_ambiguous[r, e]) and draw.random() < 0.5
        return self.first_entity + int((self._second if takes_second else self.facts)[r, e])
