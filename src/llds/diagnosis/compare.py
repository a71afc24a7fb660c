"""Two runs side by side: their verdicts, and where each series parts first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llds.diagnosis.statistics import running_median, running_noise
from llds.diagnosis.table import Table
from llds.diagnosis.telling import SHOWN

_WIDTH = 5
_LASTING = 5


@dataclass(frozen=True)
class Parting:
    """Where a series of two runs parts: at ``step`` the medians of five differ by more than noise, and go on to.

    ``step``: None if they never do. ``first``, ``second``: the medians at that step, or at the last one they share.
    """

    series: str
    step: int | None
    first: float
    second: float


def compare(one: Table, other: Table) -> list[Parting]:
    """Return the series that both runs have, those that part first at the top.

    Rows are matched by step. Raises nothing: without a step in common the list is empty.
    """
    steps, rows_one, rows_other = np.intersect1d(one.steps, other.steps, return_indices=True)
    names = [name for name in SHOWN if name in one.columns and name in other.columns]
    found = [
        parting
        for name in names
        if (
            parting := _part(
                name, steps, one.columns[name].values[rows_one], other.columns[name].values[rows_other]
            )
        )
    ]
    return sorted(found, key=lambda parting: (parting.step is None, parting.step or 0))


def _part(name: str, steps: np.ndarray, first: np.ndarray, second: np.ndarray) -> Parting | None:
    there = np.isfinite(first) & np.isfinite(second)
    if there.sum() < _WIDTH:
        return None
    steps, first, second = steps[there], first[there], second[there]
    a, b = running_median(first, _WIDTH), running_median(second, _WIDTH)
    noise = np.hypot(running_noise(first), running_noise(second))
    scale = 1e-3 * np.maximum(np.abs(a), np.abs(b))
    apart = np.abs(a - b) > np.maximum(4 * noise / np.sqrt(_WIDTH), scale)
    lasting = np.convolve(apart, np.ones(_LASTING), "valid") == _LASTING
    places = np.flatnonzero(lasting)
    place = int(places[0]) if places.size else len(steps) - 1
    return Parting(name, int(steps[place]) if places.size else None, float(a[place]), float(b[place]))
