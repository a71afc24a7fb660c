"""The canonical table: one row per step, one column per series, whatever wrote the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Damage:
    """A line that could not be read: where (``file``, ``line``, counted from 1) and why, in one sentence."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class Resume:
    """A place where the log went back: at ``line`` of ``file`` step ``to_step`` followed ``from_step``."""

    file: str
    line: int
    from_step: int
    to_step: int


@dataclass(frozen=True)
class Column:
    """One series of a log.

    ``name``: canonical name, a key of :data:`llds.diagnosis.vocabulary.SERIES`, or the log's own key where no
    canonical series is meant. ``key``: what the log calls it. ``values``: float64 [N], NaN where the row has
    no value. ``unreadable``: bool [N], true where the log printed nan or inf (``values`` holds what it
    printed), as against not printing anything. ``decimals``: digits after the point that the log prints, or
    None for full precision; with three, a 0.000 means "below 0.0005", so "cannot tell". ``masked_mean``: the
    engine averages over other tokens than the name says (a note in words), or empty.
    """

    name: str
    key: str
    values: NDArray[np.float64]
    unreadable: NDArray[np.bool_]
    decimals: int | None = None
    masked_mean: str = ""

    def at_most(self) -> NDArray[np.float64]:
        """Return the half-width of rounding of each value, float64 [N]: 0 at full precision."""
        half = 0.0 if self.decimals is None else 0.5 * 10.0**-self.decimals
        return np.full(self.values.shape, half)


@dataclass(frozen=True)
class Table:
    """A whole log.

    ``steps``: int64 [N], strictly rising: optimizer or training steps as the engine counts them; where a
    resumed run repeats a step the later row counts. ``columns``: canonical name → column, canonical ones first.
    ``format``: name of the importer. ``engine``: verl, trl, ms-swift, llds or "unknown". ``files``: what was
    read. ``rows_read``: rows before overlaps were resolved. ``lines_read``: all lines.
    """

    steps: NDArray[np.int64]
    columns: Mapping[str, Column]
    format: str
    engine: str
    files: tuple[str, ...] = ()
    rows_read: int = 0
    lines_read: int = 0
    damaged: tuple[Damage, ...] = ()
    damaged_count: int = 0
    resumes: tuple[Resume, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.steps)

    def values(self, name: str) -> NDArray[np.float64] | None:
        """Return the values of a series, float64 [N], or None where the log does not have it."""
        column = self.columns.get(name)
        return None if column is None else column.values

    def head(self, rows: int) -> Table:
        """Return the table as it was after the first ``rows`` rows; what a causal detector may see."""
        columns = {
            name: Column(c.name, c.key, c.values[:rows], c.unreadable[:rows], c.decimals, c.masked_mean)
            for name, c in self.columns.items()
        }
        return Table(
            self.steps[:rows],
            columns,
            self.format,
            self.engine,
            self.files,
            rows,
            self.lines_read,
            self.damaged,
            self.damaged_count,
            self.resumes,
            self.notes,
        )
