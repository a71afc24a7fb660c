"""The paper's table with rows of one's own: exact match by benchmark, and Gen, MH, Avg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llds.data.benchmarks import BENCHMARKS
from llds.errors import LLDSError
from llds.evaluation.contestants import BASELINES
from llds.evaluation.folder import AGENT
from llds.evaluation.paper import PaperRow, departures
from llds.evaluation.summary import GENERAL_NAMES, MULTI_HOP_NAMES

_COLUMNS = (*GENERAL_NAMES, *MULTI_HOP_NAMES, "Gen", "MH", "Avg")
_BREAKS = (GENERAL_NAMES[0], MULTI_HOP_NAMES[0], "Gen")  # columns with a line before them
_PART = "*"


@dataclass(frozen=True)
class Cell:
    """Exact match. ``low``, ``high``: 95 % interval, None for the paper's. ``part``: of a part of the questions."""

    value: float
    low: float | None = None
    high: float | None = None
    part: bool = False


@dataclass(frozen=True)
class TableRow:
    """One model. ``source``: ``measured`` or ``paper``. ``departures``: why it doesn't compare with the paper."""

    label: str
    source: str
    cells: Mapping[str, Cell]
    departures: tuple[str, ...] = ()


def rows_of(summary: Mapping[str, Any]) -> list[TableRow]:
    """Return the rows of one evaluation: the agent, then its baselines.

    Raises :class:`LLDSError` when it has no benchmark, or its summary is not what ``llds eval`` writes.
    """
    try:
        settings, contestants = summary["settings"], summary["contestants"]
        part = {name: about["questions"] != about["published"] for name, about in settings["sets"].items()}
        names = [name for name in (AGENT, *BASELINES) if name in contestants]
        why = tuple(departures(settings))
        rows = [
            TableRow(
                label=summary["label"] if name == AGENT else f"{summary['label']}, {name}",
                source="measured",
                cells=_cells(contestants[name], part),
                departures=why,
            )
            for name in names
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise LLDSError(f"The summary of an evaluation lacks {error}: run its llds eval again.") from None
    if not any(row.cells for row in rows):
        raise LLDSError(
            f"The evaluation of {summary['label']} asked none of the seven benchmarks: the table needs --benchmarks."
        )
    return rows


def paper_table_row(row: PaperRow) -> TableRow:
    """Return a row of the paper."""
    cells = {name: Cell(value) for name, value in row.exact_match.items()}
    return TableRow(f"{row.model}, {row.run} (paper)", "paper", cells)


def format_table(rows: Sequence[TableRow], markdown: bool = False) -> str:
    """Return the table as text for a terminal, or as Markdown, with notes on what doesn't compare."""
    lines = _markdown(rows) if markdown else _plain(rows)
    notes = _notes(rows, ("- ", "  - ") if markdown else ("", "  - "))
    return "\n".join([*lines, "", *notes] if notes else lines)


def table_to_json(rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    """Return the table as plain JSON values."""
    return [
        {
            "label": row.label,
            "source": row.source,
            "exact_match": {
                name: {"value": cell.value, "low": cell.low, "high": cell.high, "part": cell.part}
                for name, cell in row.cells.items()
            },
            "departures": list(row.departures),
        }
        for row in rows
    ]


def _cells(contestant: Mapping[str, Any], part: Mapping[str, bool]) -> dict[str, Cell]:
    some = any(part.get(name, True) for name in (*GENERAL_NAMES, *MULTI_HOP_NAMES))
    cells = {}
    for name in _COLUMNS:
        found = contestant["sets"].get(name, {}).get("score") or contestant["macros"].get(name)
        if found is not None:
            match = found["exact_match"]
            cells[name] = Cell(match["value"], match["low"], match["high"], part.get(name, some))
    return cells


def _texts(row: TableRow) -> list[str]:
    cells = [_figure(row.cells.get(name)) for name in _COLUMNS]
    average = row.cells.get("Avg")
    interval = (
        "" if average is None or average.low is None else f"{_digits(average.low)}–{_digits(average.high)}"
    )
    return [row.label, *cells, interval]


def _figure(cell: Cell | None) -> str:
    return "—" if cell is None else _digits(cell.value) + (_PART if cell.part else "")


def _digits(value: float | None) -> str:
    assert value is not None
    return f"{value:.3f}".removeprefix("0")


def _heads() -> list[str]:
    return [
        "exact match",
        *(BENCHMARKS[name].title if name in BENCHMARKS else name for name in _COLUMNS),
        "95 % of Avg",
    ]


def _plain(rows: Sequence[TableRow]) -> list[str]:
    table = [_heads(), *map(_texts, rows)]
    widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]
    breaks = {1 + _COLUMNS.index(name) for name in _BREAKS}

    def join(cells: Sequence[str]) -> str:
        parts = []
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            aligned = cell.ljust(width) if place == 0 else cell.rstrip(_PART).rjust(width - 1)
            mark = "" if place == 0 else (_PART if cell.endswith(_PART) else " ")
            parts.append(("| " if place in breaks else "") + aligned + mark)
        return " ".join(parts).rstrip()

    widths = [widths[0], *(width + 1 for width in widths[1:])]
    lines = [join(line) for line in table]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _markdown(rows: Sequence[TableRow]) -> list[str]:
    heads = _heads()
    rule = ["---", *("---:" for _ in heads[1:])]
    texts = [[cell.replace(_PART, "\\*").replace("|", "\\|") for cell in _texts(row)] for row in rows]
    return [f"| {' | '.join(line)} |" for line in [heads, rule, *texts]]


def _notes(rows: Sequence[TableRow], bullets: tuple[str, str]) -> list[str]:
    outer, inner = bullets
    notes = []
    if any(cell.part for row in rows for cell in row.cells.values()):
        notes.append(f"{outer}{_PART} not the published set of questions: a part of it, or others.")
    told: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row.departures:
            told.setdefault(row.departures, []).append(row.label)
    for why, labels in told.items():
        notes.append(f"{outer}Not comparable with the paper's figures: {'; '.join(labels)}.")
        notes += [f"{inner}{sentence}" for sentence in why]
    if any(row.source == "paper" for row in rows):
        notes.append(f"{outer}(paper): figures of arXiv 2512.04220 v2, not measured here.")
    return notes
