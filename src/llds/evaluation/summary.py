"""From rows to scores: per set of questions, and the averages of the paper's table.

``Gen`` is the mean over NQ, TriviaQA and PopQA, ``MH`` that over HotpotQA, 2WikiMultiHopQA, MuSiQue and Bamboogle,
``Avg`` that over all seven; every benchmark counts the same, however many questions it has. So it is in arXiv
2512.04220: 41 of the 42 averages of its table are these means, rounded (GSPO + LLDS has .451 where the mean is .450).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llds.data.benchmarks import BENCHMARKS, GENERAL, MULTI_HOP
from llds.evaluation.rows import AnswerRow
from llds.evaluation.statistics import Estimate, pass_at_k, stratified_mean
from llds.evaluation.tasks import QuestionSet

GENERAL_NAMES = tuple(name for name, one in BENCHMARKS.items() if one.group == GENERAL)
MULTI_HOP_NAMES = tuple(name for name, one in BENCHMARKS.items() if one.group == MULTI_HOP)
MACROS: Mapping[str, tuple[str, ...]] = {
    "Gen": GENERAL_NAMES,
    "MH": MULTI_HOP_NAMES,
    "Avg": (*GENERAL_NAMES, *MULTI_HOP_NAMES),
}


@dataclass(frozen=True)
class Score:
    """Scores with their 95 % intervals. ``pass_at``: by k, where questions were answered several times."""

    exact_match: Estimate
    f1: Estimate
    substring_match: Estimate
    pass_at: Mapping[int, Estimate]


@dataclass(frozen=True)
class SetScore:
    """The scores of one set of questions, and how the answers came about, per answer.

    ``left_out``: answers whose search tool failed, which count nowhere. ``searches`` are well-formed ones,
    ``valid_searches`` those that were carried out. ``valid_format``, ``answered``, ``truncated`` are shares.
    ``tokens``: written by the policy; ``response_tokens``: with what was fed back.
    """

    score: Score
    answers: int
    left_out: int
    searches: float
    valid_searches: float
    valid_format: float
    answered: float
    truncated: float
    tokens: float
    response_tokens: float


@dataclass(frozen=True)
class Summary:
    """Scores by set, and by average where every benchmark of it was asked."""

    sets: Mapping[str, SetScore]
    macros: Mapping[str, Score]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)


def summarize(rows: Sequence[AnswerRow], sets: Sequence[QuestionSet]) -> Summary:
    """Return the scores of ``rows``. A set without an answer that counts is left out, and so are its averages."""
    by_set: dict[str, list[AnswerRow]] = defaultdict(list)
    for row in rows:
        by_set[row.benchmark].append(row)
    alive = {
        one.name: by_set[one.name]
        for one in sets
        if any(not row.tool_failed for row in by_set.get(one.name, ()))
    }
    return Summary(
        sets={name: _set_score(members) for name, members in alive.items()},
        macros={
            name: _score([alive[member] for member in members])
            for name, members in MACROS.items()
            if all(member in alive for member in members)
        },
    )


def per_question(rows: Sequence[AnswerRow], score: Callable[[AnswerRow], float]) -> dict[str, float]:
    """Return the mean score of each question over its answers, without those whose search tool failed."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if not row.tool_failed:
            values[row.id].append(score(row))
    return {id_: sum(scores) / len(scores) for id_, scores in values.items()}


def _set_score(rows: Sequence[AnswerRow]) -> SetScore:
    scored = [row for row in rows if not row.tool_failed]

    def mean(value: Callable[[AnswerRow], float]) -> float:
        return sum(map(value, scored)) / len(scored)

    return SetScore(
        score=_score([rows]),
        answers=len(scored),
        left_out=len(rows) - len(scored),
        searches=mean(lambda row: row.searches),
        valid_searches=mean(lambda row: row.valid_searches),
        valid_format=mean(lambda row: row.valid_format),
        answered=mean(lambda row: row.answer is not None),
        truncated=mean(lambda row: row.truncated),
        tokens=mean(lambda row: row.tokens),
        response_tokens=mean(lambda row: row.response_tokens),
    )


def _score(strata: Sequence[Sequence[AnswerRow]]) -> Score:
    def estimate(score: Callable[[AnswerRow], float]) -> Estimate:
        return stratified_mean([list(per_question(rows, score).values()) for rows in strata])

    return Score(
        exact_match=estimate(lambda row: row.exact_match),
        f1=estimate(lambda row: row.f1),
        substring_match=estimate(lambda row: row.substring_match),
        pass_at=_pass_at(strata),
    )


def _pass_at(strata: Sequence[Sequence[AnswerRow]]) -> dict[int, Estimate]:
    """Return pass@k for 1, 2, 4, … and for all samples. A question with fewer answers than k is left out."""
    counts = [_right(rows) for rows in strata]
    most = max((answers for stratum in counts for answers, _ in stratum), default=0)
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    found: dict[int, Estimate] = {}
    for k in sorted({*powers, most}) if most > 1 else ():
        values = [[pass_at_k(n, right, k) for n, right in stratum if n >= k] for stratum in counts]
        if all(values):
            found[k] = stratified_mean(values)
    return found


def _right(rows: Sequence[AnswerRow]) -> list[tuple[int, int]]:
    """Return for every question how many answers it got, and how many were right."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        if not row.tool_failed:
            counts[row.id][0] += 1
            counts[row.id][1] += int(row.exact_match)
    return [(answers, right) for answers, right in counts.values()]
