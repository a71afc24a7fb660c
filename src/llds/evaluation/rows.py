"""One row per answer: what was asked, what came back, and what it is worth."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from llds.data.questions import Question
from llds.search.rewards import exact_match, f1_score, substring_match, valid_format
from llds.search.trajectory import Episode

Key: TypeAlias = tuple[str, str, int]
"""What tells rows apart: the set of questions, the question's id, the number of the sample."""


@dataclass(frozen=True)
class AnswerRow:
    """One answer.

    ``exact_match``, ``f1``, ``substring_match`` and ``valid_format`` are scores in [0, 1]; ``hops`` is 0 when
    unknown. ``tool_failed``: the search tool was out of order, so the answer says nothing about the policy and
    is in no summary. ``benchmark``: the set the question is from. ``sample``: 0, 1, … where a question is
    answered several times. ``tokens``: what the policy wrote; ``response_tokens``: with what was fed back.
    ``truncated``: a limit of tokens cut an action or ended the response.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...]
    hops: int
    answer: str | None
    exact_match: float
    f1: float
    searches: int
    valid_searches: int
    valid_format: float
    stop: str
    tool_failed: bool
    response: str
    benchmark: str = ""
    sample: int = 0
    substring_match: float = 0.0
    tokens: int = 0
    response_tokens: int = 0
    truncated: bool = False

    @property
    def key(self) -> Key:
        """What tells this row from others."""
        return self.benchmark, self.id, self.sample


def score(question: Question, episode: Episode, *, benchmark: str = "", sample: int = 0) -> AnswerRow:
    """Return the row of one answer."""
    return AnswerRow(
        id=question.id,
        question=question.question,
        golden_answers=question.golden_answers,
        hops=int(question.metadata.get("hops") or 0),
        answer=episode.answer,
        exact_match=exact_match(episode.answer, question.golden_answers),
        f1=f1_score(episode.answer, question.golden_answers),
        searches=episode.searches,
        valid_searches=episode.valid_searches,
        valid_format=valid_format(episode.response),
        stop=episode.stop,
        tool_failed=episode.tool_failed,
        response=episode.response,
        benchmark=benchmark,
        sample=sample,
        substring_match=substring_match(episode.answer, question.golden_answers),
        tokens=sum(episode.response_mask),
        response_tokens=len(episode.response_ids),
        truncated=episode.truncated,
    )


def to_line(row: AnswerRow) -> str:
    """Return a row as one line of JSON, with its line feed."""
    return json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n"


def from_json(row: Mapping[str, Any]) -> AnswerRow:
    """Return the row of what :func:`to_line` wrote; raises ``TypeError`` or ``KeyError`` for anything else."""
    return AnswerRow(**{**row, "golden_answers": tuple(row["golden_answers"])})
