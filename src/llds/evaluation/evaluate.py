"""Scoring a policy: every question answered once; rows, summaries with intervals, a paired comparison."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llds.data.questions import Question
from llds.errors import LLDSError
from llds.evaluation.rows import AnswerRow, from_json, score, to_line
from llds.evaluation.statistics import Estimate, bootstrap_mean, paired_difference, sign_test, wilson
from llds.files import atomic_write_text
from llds.search.episode import EpisodeRunner
from llds.search.retrieval import RetrieverUnavailable
from llds.search.rewards import normalize_answer

ALL = "all"
_HOP_NAMES = {1: "one-hop", 2: "two-hop"}


@dataclass(frozen=True)
class GroupSummary:
    """Scores over one group of questions. ``searches``: per question."""

    exact_match: Estimate
    f1: Estimate
    searches: float


@dataclass(frozen=True)
class EvalResult:
    """The answers of one policy to a list of questions."""

    rows: tuple[AnswerRow, ...]

    @property
    def scored(self) -> list[AnswerRow]:
        """The rows whose search tool worked."""
        return [row for row in self.rows if not row.tool_failed]

    @property
    def groups(self) -> dict[str, GroupSummary]:
        """Summaries of all questions and, when more than one number of hops is known, of each number."""
        scored = self.scored
        by_name = {ALL: scored}
        hops = sorted({row.hops for row in scored if row.hops})
        if len(hops) > 1:
            by_name |= {hop_name(count): [row for row in scored if row.hops == count] for count in hops}
        return {name: _summary(rows) for name, rows in by_name.items() if rows}

    @property
    def valid_search_share(self) -> float | None:
        """Carried-out searches per search; None when there was none."""
        asked = sum(row.searches for row in self.scored)
        return sum(row.valid_searches for row in self.scored) / asked if asked else None

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        scored = self.scored
        return {
            "questions": len(scored),
            "left_out_since_tool_failed": len(self.rows) - len(scored),
            "groups": {name: dataclasses.asdict(group) for name, group in self.groups.items()},
            "valid_search_share": self.valid_search_share,
            "valid_format": _mean([row.valid_format for row in scored]),
            "answered": _mean([float(row.answer is not None) for row in scored]),
            "best_constant_guess": best_constant_guess(scored),
        }


@dataclass(frozen=True)
class Comparison:
    """After minus before on the same questions, with a paired interval and the sign test's p-value."""

    exact_match: Estimate
    f1: Estimate
    p_value: float


def evaluate(
    runner: EpisodeRunner,
    questions: Sequence[Question],
    *,
    batch_size: int = 64,
    on_progress: Callable[[int], None] | None = None,
) -> EvalResult:
    """Let the policy of ``runner`` answer every question, ``batch_size`` side by side, and score the answers.

    Deterministic when the runner samples greedily. ``on_progress`` is told how many questions are done.
    Raises :class:`LLDSError` without questions, :class:`RetrieverUnavailable` when the search tool failed for all
    of them, and what the runner raises.
    """
    if not questions:
        raise LLDSError("An evaluation needs at least one question.")
    rows: list[AnswerRow] = []
    for start in range(0, len(questions), batch_size):
        batch = questions[start : start + batch_size]
        episodes = runner.run([question.question for question in batch])
        rows += [score(question, episode) for question, episode in zip(batch, episodes, strict=True)]
        if on_progress is not None:
            on_progress(len(rows))
    if all(row.tool_failed for row in rows):
        raise RetrieverUnavailable("The search tool failed for every question; check it and try again.")
    return EvalResult(tuple(rows))


def compare(before: EvalResult, after: EvalResult) -> dict[str, Comparison]:
    """Compare two evaluations question by question, for the same groups as :attr:`EvalResult.groups`.

    Questions whose search tool failed in either are left out. Raises :class:`LLDSError` when the questions
    differ.
    """
    if [row.id for row in before.rows] != [row.id for row in after.rows]:
        raise LLDSError(
            "Two evaluations can be compared only on the same questions in the same order, and these differ; "
            "make them anew."
        )
    pairs = [
        (old, new)
        for old, new in zip(before.rows, after.rows, strict=True)
        if not (old.tool_failed or new.tool_failed)
    ]
    groups = {ALL: pairs}
    hops = sorted({old.hops for old, _ in pairs if old.hops})
    if len(hops) > 1:
        groups |= {hop_name(count): [pair for pair in pairs if pair[0].hops == count] for count in hops}
    return {name: _comparison(members) for name, members in groups.items() if members}


def best_constant_guess(rows: Sequence[AnswerRow]) -> float:
    """Return the exact match of the one answer that would score best if it were given to every question."""
    accepted = [{normalize_answer(text) for text in row.golden_answers} for row in rows]
    counts = Counter(answer for answers in accepted for answer in answers)
    return max(counts.values(), default=0) / len(rows) if rows else 0.0


def hop_name(hops: int) -> str:
    """Return what people call a question with this many hops."""
    return _HOP_NAMES.get(hops, f"{hops}-hop")


def save_evaluation(path: Path, result: EvalResult) -> None:
    """Write the rows of an evaluation, one JSON object per line, atomically."""
    atomic_write_text(path, "".join(map(to_line, result.rows)))


def load_evaluation(path: Path) -> EvalResult:
    """Read what :func:`save_evaluation` wrote; raises :class:`LLDSError` when it is something else."""
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
        return EvalResult(tuple(map(from_json, rows)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LLDSError(f"{path} is not an evaluation ({error}); delete it to make it anew.") from None


def _summary(rows: Sequence[AnswerRow]) -> GroupSummary:
    return GroupSummary(
        exact_match=wilson(round(sum(row.exact_match for row in rows)), len(rows)),
        f1=bootstrap_mean([row.f1 for row in rows]),
        searches=sum(row.searches for row in rows) / len(rows),
    )


def _comparison(pairs: Sequence[tuple[AnswerRow, AnswerRow]]) -> Comparison:
    old, new = [row.exact_match for row, _ in pairs], [row.exact_match for _, row in pairs]
    return Comparison(
        exact_match=paired_difference(old, new),
        f1=paired_difference([row.f1 for row, _ in pairs], [row.f1 for _, row in pairs]),
        p_value=sign_test(old, new),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
