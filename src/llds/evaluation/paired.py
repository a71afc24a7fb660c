"""Two evaluations of the same questions, compared question by question."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llds.errors import LLDSError
from llds.evaluation.rows import AnswerRow
from llds.evaluation.statistics import Estimate, holm, sign_flip_test, sign_test, stratified_mean
from llds.evaluation.summary import MACROS, per_question


@dataclass(frozen=True)
class Change:
    """Second minus first.

    ``exact_match``, ``f1``: mean differences with a paired bootstrap interval over questions (95 %), stratified for
    averages. ``gains``, ``losses``: questions whose exact match rose and fell. ``p_value``: of exact match; for a
    set the exact sign test, for an average the sign-flip test. ``p_adjusted``: by Holm over all sets, or over the
    averages ``Gen`` and ``MH``; ``Avg`` is one question asked of the whole and stands as it is.
    """

    exact_match: Estimate
    f1: Estimate
    gains: int
    losses: int
    p_value: float
    p_adjusted: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class PairedComparison:
    """Changes by set, and by average where all its benchmarks are there; ``left_out`` questions count nowhere."""

    sets: dict[str, Change]
    macros: dict[str, Change]
    left_out: int

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)


def compare_rows(before: Sequence[AnswerRow], after: Sequence[AnswerRow]) -> PairedComparison:
    """Compare two evaluations; with several answers per question their means are compared.

    Questions without an answer that counts in either, since the search tool failed, are left out. Raises
    :class:`LLDSError` when the questions are not the same.
    """
    old, new = _by_set(before), _by_set(after)
    _check_same(old, new)
    both = {name: _answered_in_both(old[name], new[name]) for name in old}
    asked = sum(len({row.id for row in rows}) for rows in old.values())
    pairs = {name: _Pairs(old[name], new[name], ids) for name, ids in both.items() if ids}
    if not pairs:
        raise LLDSError(
            "No question has an answer that counts in both evaluations: there is nothing to compare."
        )
    sets = {name: _change([one], sign_test(one.before, one.after)) for name, one in pairs.items()}
    macros = {}
    for name, members in MACROS.items():
        if all(member in pairs for member in members):
            strata = [pairs[member] for member in members]
            macros[name] = _change(strata, sign_flip_test([one.differences for one in strata]))
    return PairedComparison(
        sets=_adjusted(sets, list(sets)),
        macros=_adjusted(macros, [name for name in macros if name != "Avg"]),
        left_out=asked - sum(map(len, both.values())),
    )


class _Pairs:
    """The scores of the same questions in two evaluations of one set."""

    def __init__(self, old: Sequence[AnswerRow], new: Sequence[AnswerRow], ids: Sequence[str]) -> None:
        scores = [
            (per_question(rows, lambda row: row.exact_match), per_question(rows, lambda row: row.f1))
            for rows in (old, new)
        ]
        (old_match, old_f1), (new_match, new_f1) = scores
        self.before = [old_match[id_] for id_ in ids]
        self.after = [new_match[id_] for id_ in ids]
        self.differences = [after - before for before, after in zip(self.before, self.after, strict=True)]
        self.f1_differences = [new_f1[id_] - old_f1[id_] for id_ in ids]


def _change(strata: Sequence[_Pairs], p_value: float) -> Change:
    differences = [change for one in strata for change in one.differences]
    return Change(
        exact_match=_difference([one.differences for one in strata]),
        f1=_difference([one.f1_differences for one in strata]),
        gains=sum(change > 0 for change in differences),
        losses=sum(change < 0 for change in differences),
        p_value=p_value,
        p_adjusted=p_value,
    )


def _difference(strata: Sequence[Sequence[float]]) -> Estimate:
    return stratified_mean(strata, shares=False)


def _adjusted(changes: dict[str, Change], names: Sequence[str]) -> dict[str, Change]:
    adjusted = dict(zip(names, holm([changes[name].p_value for name in names]), strict=True))
    return {
        name: dataclasses.replace(change, p_adjusted=adjusted.get(name, change.p_value))
        for name, change in changes.items()
    }


def _by_set(rows: Sequence[AnswerRow]) -> dict[str, list[AnswerRow]]:
    sets: dict[str, list[AnswerRow]] = defaultdict(list)
    for row in rows:
        sets[row.benchmark].append(row)
    return dict(sets)


def _answered_in_both(old: Sequence[AnswerRow], new: Sequence[AnswerRow]) -> list[str]:
    """Return the ids of the questions with an answer that counts in both, in the order of the first."""
    second = {row.id for row in new if not row.tool_failed}
    return list(dict.fromkeys(row.id for row in old if not row.tool_failed and row.id in second))


def _check_same(old: dict[str, list[AnswerRow]], new: dict[str, list[AnswerRow]]) -> None:
    first, second = (
        {(name, row.id, row.question) for name, rows in sets.items() for row in rows} for sets in (old, new)
    )
    if first != second:
        raise LLDSError(
            "Two evaluations can be compared only on the same questions, and of these "
            f"{len(first - second)} are only in the first and {len(second - first)} only in the second: run "
            "both with the same --benchmarks, --only and --questions."
        )
