"""The page of several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from llds.diagnosis.telling import headline
from llds.errors import LLDSError
from llds.evaluation.evaluate import ALL, EvalResult, compare
from llds.evaluation.report import p_value, percent, points
from llds.pages import charts, document, escape, rows
from llds.report.record import AFTER, BEFORE, Record
from llds.report.series import overlay_charts

#: As many colours as charts have.
MOST_RUNS = 4
# Settings that tell runs apart by name alone.
_NAMES = frozenset({"run.name", "run.folder"})


def comparison_page(records: Sequence[Record]) -> str:
    """Return the page of two to :data:`MOST_RUNS` runs.

    Gains are paired on the questions that both were asked, against the first run. Raises :class:`LLDSError` for
    fewer or more runs.
    """
    if not 2 <= len(records) <= MOST_RUNS:
        raise LLDSError(f"A comparison takes 2 to {MOST_RUNS} runs, not {len(records)}.")
    labels = _labels(records)
    tables = {label: one.table for label, one in zip(labels, records, strict=True) if one.table is not None}
    key = " ".join(
        f'<svg viewBox="0 0 30 10" style="display:inline;width:30px;height:10px"><path class="line l{number}" '
        f'd="M0,5H30" style="stroke-width:3"/></svg> {escape(label)}'
        for number, label in enumerate(tables)
    )
    body = [
        f"<h1>{escape(' · '.join(labels))}</h1>",
        _score_rows(labels, records),
        "<h2>Settings that differ</h2>",
        _differences(labels, records),
        f"<h2>Series</h2><p>{key}</p>",
        charts(overlay_charts(tables)),
    ]
    return document("llds: " + ", ".join(labels), body)


def _labels(records: Sequence[Record]) -> list[str]:
    """Return the names of runs; of runs with one name, their folders."""
    names = [one.name for one in records]
    return names if len(set(names)) == len(names) else [str(one.folder) for one in records]


def _score_rows(labels: Sequence[str], records: Sequence[Record]) -> str:
    first = records[0].evaluations.get(AFTER)
    lines = []
    for label, record in zip(labels, records, strict=True):
        after = record.evaluations.get(AFTER)
        lines.append(
            [
                label,
                str(record.last_step),
                _match(record.evaluations.get(BEFORE)),
                _match(after),
                _against(first, after) if record is not records[0] else "",
                headline(record.diagnosis) if record.diagnosis else "",
                str(len(record.events_of("alarm"))),
                str(len(record.events_of("rollback"))),
            ]
        )
    head = ["run", "steps", "exact match before", "after", f"less {labels[0]}, points", "diagnosis", "alarms"]
    return rows([*head, "rollbacks"], lines)


def _match(result: EvalResult | None) -> str:
    return percent(result.groups[ALL].exact_match) if result is not None and result.groups else ""


def _against(first: EvalResult | None, second: EvalResult | None) -> str:
    if first is None or second is None:
        return ""
    try:
        change = compare(first, second).get(ALL)
    except LLDSError:
        return "other questions"
    return f"{points(change.exact_match)}, {p_value(change.p_value)}" if change else ""


def _differences(labels: Sequence[str], records: Sequence[Record]) -> str:
    settings = [one.settings for one in records]
    if not all(settings):
        return "<p>A recipe of these runs holds settings that this version of llds does not know.</p>"
    keys = [key for key in settings[0] if key not in _NAMES and len({one[key] for one in settings}) > 1]
    if not keys:
        return "<p>None.</p>"
    return rows(["setting", *labels], [[key, *(one[key] for one in settings)] for key in keys])
