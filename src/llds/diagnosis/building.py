"""Rows into a table: columns by their canonical names, resumed runs put together, damage counted."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from llds.diagnosis.formats.rows import Bad, Row
from llds.diagnosis.table import Column, Damage, Resume, Table
from llds.diagnosis.vocabulary import averaging_note, canonical_names

_MOST_KEYS = 3000
_DAMAGE_SHOWN = 20
# Python prints 0.0 for a zero of full precision; a format that rounds prints 0.00 or 0.000.
_FEWEST_DIGITS = 2
_MOST_STEPS = 2**53


class TableBuilder:
    """Takes rows in the order of the log; :meth:`table` may be asked at any time."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._columns: dict[str, array[float]] = {}
        self._decimals: dict[str, tuple[int, int] | None] = {}
        self._files: list[str] = []
        self._damaged: list[Damage] = []
        self._damaged_count = 0
        self._resumes: list[Resume] = []
        self._rows_read = 0
        self._unnumbered = 0
        self._dropped_keys: set[str] = set()
        self.lines_read = 0
        self.notes: list[str] = []

    def __len__(self) -> int:
        return len(self._steps)

    def open(self, name: str) -> None:
        """Say that the rows from now on come from this file."""
        self._files.append(name)

    def add(self, row: Row | Bad, line: int = 0) -> None:
        """Add a row, or note one that could not be read."""
        name = self._files[-1] if self._files else ""
        if isinstance(row, Bad):
            self._damaged_count += 1
            if len(self._damaged) < _DAMAGE_SHOWN:
                self._damaged.append(Damage(name, row.line, row.reason))
            return
        self._rows_read += 1
        step = row.step
        if step is None:
            self._unnumbered += 1
            step = self._steps[-1] + 1 if self._steps else 1
        index = self._place(step, row, name, line)
        for key, value in row.values.items():
            column = self._column(key)
            if column is not None:
                column[index] = value if value == value else PRINTED_NAN
                self._note_decimals(key, row)

    def _place(self, step: int, row: Row, name: str, line: int) -> int:
        """Return the index of the row for ``step``; drop what a resumed run does again."""
        if self._steps and step <= self._steps[-1]:
            at = int(np.searchsorted(self._steps, step))
            is_there = self._steps[at] == step
            if is_there and not self._overlaps(at, row):
                return at
            if not (is_there and at == len(self._steps) - 1):
                self._resumes.append(Resume(name, line, self._steps[-1], step))
            self._cut(at)
        self._steps.append(step)
        for column in self._columns.values():
            column.append(math.nan)
        return len(self._steps) - 1

    def _overlaps(self, at: int, row: Row) -> bool:
        """Say whether the row repeats a value that is there already; others go into the same row."""
        return any(key in self._columns and not math.isnan(self._columns[key][at]) for key in row.values)

    def _cut(self, at: int) -> None:
        del self._steps[at:]
        for column in self._columns.values():
            del column[at:]

    def _column(self, key: str) -> array[float] | None:
        column = self._columns.get(key)
        if column is None:
            if len(self._columns) >= _MOST_KEYS:
                self._dropped_keys.add(key)
                return None
            column = self._columns[key] = array("d", [math.nan]) * len(self._steps)
        return column

    def _note_decimals(self, key: str, row: Row) -> None:
        """Keep the fewest and the most digits that a key was printed with: equal in a format that rounds."""
        digits = row.decimals.get(key)
        known = self._decimals.get(key, () if key not in self._decimals else None)
        if digits is None or known is None:
            self._decimals[key] = None
        else:
            self._decimals[key] = (min((digits, *known)), max((digits, *known)))

    def table(self, format: str, engine: str = "") -> Table:
        """Return everything that was read so far."""
        steps = np.array(self._steps, dtype=np.int64)
        found = canonical_names(self._columns)
        taken = {key for keys in found.values() for key in keys}
        columns = {name: self._canonical(name, keys) for name, keys in found.items()}
        columns |= {
            key: self._canonical(key, [key])
            for key in self._columns
            if key not in taken and key not in columns
        }
        notes = list(self.notes)
        kept = _training_rows(columns, len(steps))
        if not kept.all():
            notes.append(f"Rows with validation figures only are left out: {int((~kept).sum())}.")
        if self._unnumbered:
            notes.append(f"The log does not number its steps; {self._unnumbered} rows were counted.")
        if self._dropped_keys:
            notes.append(f"{len(self._dropped_keys)} keys beyond the first {_MOST_KEYS} were left out.")
        return Table(
            steps=steps[kept],
            columns={name: _rows_of(column, kept) for name, column in columns.items()},
            format=format,
            engine=engine or engine_of(self._columns),
            files=tuple(self._files),
            rows_read=self._rows_read,
            lines_read=self.lines_read,
            damaged=tuple(self._damaged),
            damaged_count=self._damaged_count,
            resumes=tuple(self._resumes),
            notes=tuple(notes),
        )

    def _canonical(self, name: str, keys: list[str]) -> Column:
        values = [np.array(self._columns[key], dtype=np.float64) for key in keys]
        merged = values[0] if len(values) == 1 else _mean(values)
        digits = self._decimals.get(keys[0])
        rounds = digits is not None and digits[0] == digits[1] and digits[0] >= _FEWEST_DIGITS
        decimals = digits[0] if rounds and digits is not None and len(keys) == 1 else None
        unreadable = ~np.isfinite(merged) & ~_absent(merged)
        return Column(name, keys[0], merged, unreadable, decimals, averaging_note(keys[0]))


def _absent(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.isnan(values) & ~_printed_nan(values)
    return found


#: A NaN that a log printed, as against one that stands for no value: told apart by its payload.
PRINTED_NAN = float(np.array([0x7FF8000000000001], dtype=np.uint64).view(np.float64)[0])


def _printed_nan(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = values.view(np.uint64) == np.uint64(0x7FF8000000000001)
    return found


def _mean(values: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    stack = np.stack(values)
    there = np.isfinite(stack)
    count = there.sum(0)
    total = np.where(there, stack, 0.0).sum(0)
    mean: NDArray[np.float64] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean


def _training_rows(columns: dict[str, Column], length: int) -> NDArray[np.bool_]:
    """Say which rows hold more than validation figures."""
    kept = np.zeros(length, dtype=bool)
    for name, column in columns.items():
        if name != "validation" and not column.key.startswith(
            ("val-", "val/", "eval_", "eval/", "timing_s/testing")
        ):
            kept |= ~_absent(column.values)
    return kept


def _rows_of(column: Column, kept: NDArray[np.bool_]) -> Column:
    return Column(
        column.name,
        column.key,
        column.values[kept],
        column.unreadable[kept],
        column.decimals,
        column.masked_mean,
    )


def engine_of(keys: Iterable[str]) -> str:
    """Guess from its keys who wrote a log."""
    known = set(keys)
    if any(key.startswith("llds/") for key in known) and {"rollout", "groups_without_signal"} & known:
        return "llds"
    if any(key.startswith(("actor/", "critic/")) for key in known):
        return "verl"
    if any(key.startswith(("completions/", "rewards/")) or key == "completion_length" for key in known):
        return "trl"
    return "unknown"
