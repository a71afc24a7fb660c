"""The charts of a run: which series stand together, and how they are smoothed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llds.diagnosis.table import Table
from llds.dynamics.phases import PHASES
from llds.plots import Mark, line_chart

Floats = NDArray[np.float64]
# A mean over a twentieth of a run shows where it goes; short runs are shown as they are.
_PARTS = 20
_SHORT = 40
#: Width of the strip of phases, and of the charts, in the units of their viewBox.
WIDTH = 560


@dataclass(frozen=True)
class Panel:
    """One chart: its title, unit, and the series in it, each with what it is called there."""

    title: str
    unit: str
    lines: Mapping[str, str]


PANELS = (
    Panel("Reward", "mean over a rollout", {"reward": "reward"}),
    Panel("Log-prob of responses", "nats/token", {"logprob_correct": "correct", "logprob_wrong": "wrong"}),
    Panel(
        "Displacement since the rollout: above 0 is lost",
        "nats/token",
        {"displacement_correct": "correct", "displacement_wrong": "wrong"},
    ),
    Panel(
        "NLL by rounds of feedback before",
        "nats/token",
        {"nll_round_0": "none", "nll_round_1": "one", "nll_round_2": "two"},
    ),
    Panel("Entropy", "nats/token", {"entropy": "entropy"}),
    Panel("Gradient norm", "", {"grad_norm": "gradient norm"}),
    Panel("Searches and turns", "per response", {"searches": "searches", "turns": "turns"}),
    Panel("Tokens written", "per response", {"response_tokens": "tokens"}),
    Panel("LLDS: loss", "as added", {"llds_loss": "loss"}),
    Panel("LLDS: gates", "share", {"gate_rate": "open gates", "penalised_share": "penalised tokens"}),
)


def smoothed(values: Floats) -> Floats:
    """Return a centred running mean over a twentieth of the values that are there; NaN where there is none."""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) <= _SHORT:
        return values
    half = max(1, len(known) // (2 * _PARTS))
    sums = np.concatenate([[0.0], np.cumsum(values[known])])
    first = np.maximum(np.arange(len(known)) - half, 0)
    last = np.minimum(np.arange(len(known)) + half + 1, len(known))
    mean = np.full(len(values), np.nan)
    mean[known] = (sums[last] - sums[first]) / (last - first)
    return mean


def run_charts(table: Table, marks: Sequence[Mark]) -> list[str]:
    """Return the usual charts of one run: faint what was measured, bold its running mean."""
    return [_panel_chart(panel, table, marks) for panel in PANELS]


def other_charts(table: Table, most: int = 120) -> list[str]:
    """Return a chart for each series that has no place among the usual ones, at most ``most``."""
    shown = {name for panel in PANELS for name in panel.lines}
    names = [name for name in table.columns if name not in shown][:most]
    steps = table.steps.tolist()
    return [
        line_chart(name, "", steps, [(name, table.columns[name].values.tolist())], points=300)
        for name in names
    ]


def _panel_chart(panel: Panel, table: Table, marks: Sequence[Mark]) -> str:
    found = [
        (label, values) for name, label in panel.lines.items() if (values := table.values(name)) is not None
    ]
    return line_chart(
        panel.title,
        panel.unit,
        table.steps.tolist(),
        [(label, smoothed(values).tolist()) for label, values in found],
        behind=[(label, values.tolist()) for label, values in found],
        legend=len(found) > 1,
        marks=marks,
        points=400,
        width=WIDTH,
    )


def overlay_charts(tables: Mapping[str, Table]) -> list[str]:
    """Return the charts of several runs, one above the other: of each panel its first series."""
    pictures = []
    for panel in PANELS:
        name, label = next(iter(panel.lines.items()))
        having = {run: table for run, table in tables.items() if table.values(name) is not None}
        steps = (
            np.unique(np.concatenate([table.steps for table in having.values()])) if having else np.array([])
        )
        lines = [(run, _on(steps, table, name).tolist()) for run, table in having.items()]
        title = panel.title if len(panel.lines) == 1 else f"{panel.title}: {label}"
        # A colour is a run: one that lacks a series keeps the others' colours by an empty line.
        every = [(run, dict(lines).get(run, [math.nan] * len(steps))) for run in tables]
        pictures.append(line_chart(title, panel.unit, steps.tolist(), every, points=400, width=WIDTH))
    return pictures


def _on(steps: NDArray[np.int64], table: Table, name: str) -> Floats:
    values = np.full(len(steps), np.nan)
    values[np.searchsorted(steps, table.steps)] = smoothed(table.columns[name].values)
    return values


def phase_strip(table: Table) -> str:
    """Return the phases of a run as a strip of colours over its steps; nothing where they were not told."""
    phases = table.values("phase")
    if phases is None or not np.isfinite(phases).any():
        return ""
    known = np.flatnonzero(np.isfinite(phases))
    changes = [0, *(np.flatnonzero(np.diff(phases[known])) + 1), len(known)]
    steps = table.steps[known]
    scale = WIDTH / (int(steps[-1]) - int(steps[0]) + 1)
    blocks = []
    for begin, end in pairwise(changes):
        first, last, phase = int(steps[begin]), int(steps[end - 1]), int(phases[known[begin]])
        left, wide = (first - int(steps[0])) * scale, (last - first + 1) * scale
        name = PHASES.get(phase, str(phase))
        blocks.append(
            f'<rect class="phase{max(phase, -1) + 1}" x="{left:.1f}" y="0" width="{wide:.1f}" height="14">'
            f"<title>steps {first} to {last}: {name}</title></rect>"
        )
    return f'<svg viewBox="0 0 {WIDTH} 14" role="img" aria-label="Phases">{"".join(blocks)}</svg>'
