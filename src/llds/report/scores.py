"""Held-out scores as tables: before and after, over training, and which answers changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llds.evaluation.evaluate import ALL, EvalResult, compare
from llds.evaluation.report import p_value, percent, points
from llds.evaluation.rows import AnswerRow
from llds.pages import escape, folded, rows
from llds.plots import line_chart
from llds.report.record import AFTER, BEFORE, Record

#: Questions of each kind that are shown.
_EXAMPLES = 8


def score_table(record: Record) -> str:
    """Return exact match before and after with intervals, and the paired gain; what is there of it."""
    found = record.evaluations
    before, after = found.get(BEFORE), found.get(AFTER)
    gains = compare(before, after) if before and after else {}
    newest = after or before
    groups = newest.groups if newest is not None else {}
    lines = [
        [
            f"{name} ({group.exact_match.count})",
            _match(before, name),
            _match(after, name),
            f"{points(gains[name].exact_match)}, {p_value(gains[name].p_value)}" if name in gains else "",
        ]
        for name, group in groups.items()
    ]
    off = [found.get(f"{name}-without-retriever") for name in (BEFORE, AFTER)]
    if any(off):
        lines.append(["search tool off", *(_match(one, ALL) for one in off), ""])
    return rows(["exact match, 95 % intervals", "before", "after", "gain in points"], lines)


def score_chart(record: Record) -> str:
    """Return exact match over training, where it was taken more than twice; nothing else."""
    per_rollout = {row["rollout"]: row["step"] for row in record.rows}
    places = {BEFORE: 0, AFTER: record.last_step}
    for name in record.evaluations:
        kind, _, digits = name.rpartition("-")
        if kind == "rollout" and digits.isdigit() and int(digits) in per_rollout:
            places[name] = per_rollout[int(digits)]
    found = sorted((places[name], one) for name, one in record.evaluations.items() if name in places)
    if len(found) < 3:
        return ""
    values = [one.groups[ALL].exact_match.value if one.groups else float("nan") for _, one in found]
    return line_chart("Held-out exact match", "share", [step for step, _ in found], [("exact match", values)])


def changed_answers(evaluations: Mapping[str, EvalResult]) -> str:
    """Return questions that became right, and such that became wrong, with both answers."""
    before, after = evaluations.get(BEFORE), evaluations.get(AFTER)
    if before is None or after is None:
        return ""
    old = {row.id: row for row in before.scored}
    pairs = [(old[row.id], row) for row in after.scored if row.id in old]
    won = [pair for pair in pairs if pair[0].exact_match < pair[1].exact_match]
    lost = [pair for pair in pairs if pair[0].exact_match > pair[1].exact_match]
    return _examples("became right", won) + _examples("became wrong", lost)


def _examples(what: str, pairs: Sequence[tuple[AnswerRow, AnswerRow]]) -> str:
    blocks = []
    for old, new in pairs[:_EXAMPLES]:
        both = "".join(
            f'<p class="dim">{title}: {escape(row.answer if row.answer is not None else "no answer")}</p>'
            f"<pre>{escape(row.response.strip())}</pre>"
            for title, row in (("before", old), ("after", new))
        )
        accepted = escape(", ".join(new.golden_answers))
        blocks.append(
            f'<div class="response"><strong>{escape(new.question)}</strong>'
            f'<div class="dim">accepted: {accepted}</div>{both}</div>'
        )
    first = f", the first {_EXAMPLES}" if len(pairs) > _EXAMPLES else ""
    return folded(f"{len(pairs)} answers {what}{first}", "".join(blocks))


def _match(result: EvalResult | None, group: str) -> str:
    if result is None or group not in result.groups:
        return ""
    return percent(result.groups[group].exact_match)
