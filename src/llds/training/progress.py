"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere. Always on
stderr.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from llds.training.records import what_llds_did


@dataclass(frozen=True)
class Shown:
    """A metric on display: its key in ``metrics.jsonl``, what people call it, how its number is written."""

    key: str
    label: str
    form: str


LLDS_LOSS = "llds/loss"
SHOWN = (
    Shown("reward", "reward", "{:.3f}"),
    Shown("exact_match", "exact match", "{:.3f}"),
    Shown("searches", "searches", "{:.2f}"),
    Shown("valid_search_share", "valid searches", "{:.0%}"),
    Shown("llds/logprob_correct", "log-lik. of correct", "{:.4f}"),
    Shown("llds/displacement_correct", "displacement", "{:+.2e}"),
    Shown("llds/gate_rate", "gates open", "{:.0%}"),
    Shown(LLDS_LOSS, "LLDS loss", "{:.2e}"),
    Shown("entropy", "entropy", "{:.3f}"),
    Shown("grad_norm", "grad norm", "{:.2f}"),
)


# Seconds of a phase: how often plain lines say how far it is, and from which length on they say its end.
_SECONDS_BETWEEN_LINES = 15.0
_WORTH_TELLING = 2.0


class Counter(Protocol):
    """Counts the work done in one phase."""

    def __call__(self, done: int) -> None:
        """Say that ``done`` units are finished in all."""


class Display(Protocol):
    """What a run tells while it goes on. Used as a context manager round the whole run."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *exception: object) -> None: ...

    def phase(self, title: str, total: int) -> AbstractContextManager[Counter]:
        """Return a context manager that yields a :class:`Counter` for a phase of ``total`` units."""

    def training(self, first: int, last: int) -> AbstractContextManager[None]:
        """Return a context manager round the training loop from step ``first`` to step ``last``."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Show one line of ``metrics.jsonl``."""

    def note(self, text: str) -> None:
        """Show a sentence that stays on the screen."""


def make_display(stream: TextIO) -> Display:
    """Return the live display on a terminal, plain lines elsewhere, nothing but for the first process."""
    if not is_first_process():
        return PlainDisplay(io.StringIO())
    console = Console(file=stream)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(stream)


def is_first_process() -> bool:
    """Say whether this is the process that speaks, of those that a launcher such as torchrun started."""
    return os.environ.get("RANK", "0") == "0"


class PlainDisplay:
    """One line per step and per phase, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._clock = _Clock(0, 0)

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.flush()

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Counter]:
        """See :class:`Display`."""
        start = told = time.monotonic()

        def count(done: int) -> None:
            nonlocal told
            if time.monotonic() - told >= _SECONDS_BETWEEN_LINES:
                told = time.monotonic()
                self.note(f"{title}: {done} of {total}")

        yield count
        seconds = time.monotonic() - start
        if seconds >= _WORTH_TELLING:
            self.note(f"{title}: done in {seconds:.0f} s")

    @contextmanager
    def training(self, first: int, last: int) -> Iterator[None]:
        """See :class:`Display`."""
        self._clock = _Clock(first, last)
        yield

    def step(self, row: Mapping[str, Any]) -> None:
        """See :class:`Display`."""
        parts = [f"{label} {value}" for label, value in shown_metrics(row)]
        left = self._clock.left(row["step"])
        self.note(f"step {row['step']}/{self._clock.last}  " + "  ".join([*parts, f"left {left}"]))

    def note(self, text: str) -> None:
        """See :class:`Display`."""
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveDisplay:
    """A table of the newest numbers above a progress bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._latest: dict[str, Any] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)
        self._training: TaskID | None = None

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Counter]:
        """See :class:`Display`."""
        task = self._bars.add_task(title, total=total)
        self._live.refresh()
        try:
            yield lambda done: self._bars.update(task, completed=done)
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def training(self, first: int, last: int) -> Iterator[None]:
        """See :class:`Display`."""
        self._training = self._bars.add_task("training", total=last, completed=first)
        try:
            yield
        finally:
            self._bars.remove_task(self._training)
            self._training = None

    def step(self, row: Mapping[str, Any]) -> None:
        """See :class:`Display`."""
        self._latest.update(row)
        if self._training is not None:
            self._bars.update(self._training, completed=row["step"])
        self._live.refresh()

    def note(self, text: str) -> None:
        """See :class:`Display`."""
        self._console.print(Text(text))

    def _render(self) -> Group:
        return Group(metrics_table(self._latest), self._bars)


def shown_metrics(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return label and text of the metrics that people watch. A zero of LLDS says of which kind it is."""
    zero = what_llds_did(row)
    return [
        (
            shown.label,
            zero if shown.key == LLDS_LOSS and row[shown.key] == 0 else _number(shown, row[shown.key]),
        )
        for shown in SHOWN
        if shown.key in row
    ]


def metrics_table(row: Mapping[str, Any]) -> Table:
    """Return the metrics of ``row`` that people watch, two side by side."""
    table = Table.grid(padding=(0, 2))
    cells = shown_metrics(row)
    for index in range(0, len(cells), 2):
        pair = cells[index : index + 2]
        table.add_row(
            *(
                Text(text, style=style)
                for cell in pair
                for text, style in zip(cell, ("dim", "bold"), strict=True)
            )
        )
    return table


class _Clock:
    """Estimates the time left from the steps done since it was made."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.start = first, last, time.monotonic()

    def left(self, step: int) -> str:
        done = step - self.first
        if done <= 0:
            return "?"
        seconds = int((time.monotonic() - self.start) / done * (self.last - step))
        return f"{seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def _number(shown: Shown, value: Any) -> str:
    # metrics that are not finite are text already
    return shown.form.format(value) if isinstance(value, int | float) else str(value)
