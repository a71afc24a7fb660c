"""What is to be answered: sets of questions, each question once or several times, each time with its own seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llds.data.questions import Question
from llds.evaluation.rows import Key


@dataclass(frozen=True)
class QuestionSet:
    """Questions with a name.

    ``available``: how many the set has, of which ``questions`` may be a part. ``published``: how many the
    published set has, where it is one of the seven benchmarks.
    """

    name: str
    questions: tuple[Question, ...]
    available: int
    published: int | None = None

    def about(self) -> dict[str, Any]:
        """Return what tells this set from another, as plain JSON values."""
        rows = [[one.id, one.question, list(one.golden_answers)] for one in self.questions]
        digest = hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode("utf-8", "replace")).hexdigest()
        return {
            "questions": len(self.questions),
            "available": self.available,
            "published": self.published,
            "digest": digest[:16],
        }


@dataclass(frozen=True)
class Task:
    """One answer to be given."""

    benchmark: str
    question: Question
    sample: int

    @property
    def key(self) -> Key:
        """What tells this task from others; that of its row."""
        return self.benchmark, self.question.id, self.sample

    def seed(self, seed: int) -> int:
        """Return the seed of this answer alone, from 0 to 2**63 - 1."""
        digest = hashlib.sha256(json.dumps([seed, *self.key]).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


def make_tasks(sets: Sequence[QuestionSet], samples: int) -> list[Task]:
    """Return all tasks in the order in which their rows are kept: by set, by question, by sample."""
    return [
        Task(one.name, question, sample)
        for one in sets
        for question in one.questions
        for sample in range(samples)
    ]
