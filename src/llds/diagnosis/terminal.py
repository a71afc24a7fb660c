"""A diagnosis as a page for a terminal."""

from __future__ import annotations

import math

import numpy as np
from rich.console import Console
from rich.text import Text

from llds.diagnosis.findings import Diagnosis
from llds.diagnosis.table import Table
from llds.diagnosis.telling import about, headline, shown_series, summary
from llds.plots import short_number, sparkline

_STYLES = {"ok": "bold green", "info": "bold cyan", "warning": "bold yellow", "critical": "bold red"}
_MOST_LINES = 9


def show(diagnosis: Diagnosis, table: Table, console: Console) -> None:
    """Print the page."""
    style = _STYLES[diagnosis.severity]
    _print(console, Text(f"{diagnosis.severity.upper()}: {headline(diagnosis)}", style=style))
    _print(console, Text(summary(diagnosis)))
    _print(console, Text(about(table), style="dim"))
    _series(diagnosis, table, console)
    for finding in diagnosis.findings:
        _print(
            console,
            Text(f"\n{finding.title} ({finding.kind}, {finding.severity})", style=_STYLES[finding.severity]),
        )
        for signal in finding.signals[:6]:
            _print(console, Text(f"  - {signal.evidence}"))
    advice = [line for finding in diagnosis.findings[:1] for line in finding.advice]
    _list(console, "What to change", advice)
    _list(console, "What it was not", [f"{one.kind}: {one.why}" for one in diagnosis.ruled_out])
    _list(console, "What this log cannot tell", [one.sentence for one in diagnosis.missing])
    _list(console, "Notes", list(diagnosis.notes))


def _list(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        _print(console, Text(f"\n{title}", style="bold"))
        for line in lines:
            _print(console, Text(f"  - {line}"))


def _series(diagnosis: Diagnosis, table: Table, console: Console) -> None:
    """Print a line per series: its course, with a mark below at the onset, and its numbers."""
    names = shown_series(table, diagnosis)[:_MOST_LINES]
    if not names or not len(table):
        return
    wide = max(len(name) for name in names)
    width = max(8, min(60, console.width - wide - 30))
    plain = _is_ascii(console)
    console.print()
    for name in names:
        values = table.columns[name].values.tolist()
        known = [value for value in values if math.isfinite(value)]
        if not known:
            continue
        line = sparkline(values, width, plain)
        span = f"{short_number(known[0])} -> {short_number(known[-1])}"
        _print(console, Text(f"  {name:<{wide}}  {line}  {span}"))
    if diagnosis.onset_step is not None:
        row = int(np.searchsorted(table.steps, diagnosis.onset_step))
        place = min(width - 1, row * width // len(table))
        _print(console, Text(f"  {'':<{wide}}  {' ' * place}^ step {diagnosis.onset_step}", style="bold"))


def _print(console: Console, text: Text) -> None:
    if _is_ascii(console):
        text = Text(text.plain.encode("ascii", "replace").decode("ascii"), style=text.style)
    console.print(text, highlight=False, markup=False)


def _is_ascii(console: Console) -> bool:
    try:
        "▁█→—".encode(console.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False
