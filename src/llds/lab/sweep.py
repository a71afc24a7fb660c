"""Many runs side by side: worker processes make them, this process writes them down, one by one.

A run is the unit that is lost when everything is killed; the next sweep takes up those that are not stored.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from llds.errors import LLDSError
from llds.lab.arms import arm_named
from llds.lab.loop import Row, Run
from llds.lab.regimes import regime_named
from llds.lab.series import Store, settings_of
from llds.lab.starts import load_start, start_path
from llds.training.interrupt import stop_on_signal
from llds.training.progress import Display

#: Seconds to wait for news from the workers before looking whether to stop.
_PATIENCE = 0.5


@dataclass(frozen=True)
class Cell:
    """One run to make."""

    regime: str
    arm: str
    seed: int


@dataclass(frozen=True)
class SweepResult:
    """``made``: runs of this call. ``stored``: runs that were there. ``exit_code``: 0, or by the signal."""

    made: int
    stored: int
    exit_code: int


def plan(store: Store, regimes: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Return the runs that are not stored yet: regime by regime, arm by arm, seed by seed.

    Raises ``LLDSError`` for an unknown name, and for files made with other settings.
    """
    cells = []
    for regime in regimes:
        for arm in arms:
            there = store.seeds(regime, arm, settings_of(regime_named(regime), arm_named(arm)))
            cells += [Cell(regime, arm, seed) for seed in seeds if seed not in there]
    return cells


def sweep(
    store: Store,
    starts: Path,
    regimes: Sequence[str],
    arms: Sequence[str],
    seeds: Sequence[int],
    workers: int,
    display: Display,
) -> SweepResult:
    """Make every run that is not stored yet, with ``workers`` processes of one thread each.

    ``starts``: folder of the warm starts. The first Ctrl-C stops all workers; what is stored stays.
    """
    if workers < 1:
        raise LLDSError(f"workers must be at least 1, but is {workers}.")
    cells = plan(store, regimes, arms, seeds)
    stored = len(regimes) * len(arms) * len(seeds) - len(cells)
    with display, stop_on_signal(lambda: display.note("Stopping; stored runs are kept.")) as request:
        for name in dict.fromkeys(cell.regime for cell in cells):
            _make_start(starts, name, display)
        made = _work_off(store, starts, cells, workers, display, lambda: request.requested)
    return SweepResult(made, stored, request.exit_code)


def make_run(starts: Path, cell: Cell, told: Callable[[Row], None] = lambda row: None) -> dict[str, Any]:
    """Make one run and return what :meth:`Store.add` wants of it."""
    torch.set_num_threads(1)
    regime, arm = regime_named(cell.regime), arm_named(cell.arm)
    start = load_start(starts, regime)
    began = time.process_time()
    result = Run(regime, arm, cell.seed, start).finish(told)
    return {
        "settings": settings_of(regime, arm),
        "seed": cell.seed,
        "rows": result.rows,
        "cpu_seconds": time.process_time() - began,
    }


def _make_start(starts: Path, name: str, display: Display) -> None:
    regime = regime_named(name)
    if not start_path(starts, regime).exists():
        with display.phase(f"warm start of {name}", regime.start.steps) as count:
            load_start(starts, regime, count)


def _work_off(
    store: Store,
    starts: Path,
    cells: Sequence[Cell],
    workers: int,
    display: Display,
    stops: Callable[[], bool],
) -> int:
    """Let workers make the cells and store what comes back; return how many were made."""
    made = rollouts = 0
    total = sum(regime_named(cell.regime).rollouts for cell in cells)
    with display.phase(f"{len(cells)} runs, rollouts", total) as count:
        for cell, run in _made_by_crew(starts, cells, workers, stops):
            if run is None:
                rollouts += 1
                count(rollouts)
            else:
                store.add(cell.regime, cell.arm, **run)
                made += 1
                display.note(_told(cell, run))
    return made


def _made_by_crew(
    starts: Path, cells: Sequence[Cell], workers: int, stops: Callable[[], bool]
) -> Iterator[tuple[Cell, dict[str, Any] | None]]:
    """Yield every cell with its run when that is finished, and with None for each of its rollouts."""
    waiting = list(reversed(cells))
    crew = [_Worker(starts) for _ in range(min(workers, len(cells)))]
    try:
        while not stops():
            for worker in crew:
                if worker.cell is None and waiting:
                    worker.give(waiting.pop())
            busy = [worker for worker in crew if worker.cell is not None]
            if not busy:
                return
            ready = wait([worker.line for worker in busy], _PATIENCE)
            for worker in busy:
                if worker.line in ready:
                    yield worker.hear()
    finally:
        for worker in crew:
            worker.dismiss()


def _told(cell: Cell, news: dict[str, Any]) -> str:
    last = [row["reward"] for row in news["rows"][-10:]]
    return (
        f"{cell.regime}, {cell.arm}, seed {cell.seed}: reward {sum(last) / len(last):.3f} at the end, "
        f"{news['cpu_seconds']:.0f} CPU s"
    )


class _Worker:
    """A process that makes one run after the other, and dies when nobody listens any more."""

    def __init__(self, starts: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(starts)), daemon=True)
        self._process.start()
        theirs.close()
        self.cell: Cell | None = None

    def give(self, cell: Cell) -> None:
        self.cell = cell
        self.line.send(asdict(cell))

    def hear(self) -> tuple[Cell, dict[str, Any] | None]:
        """Return the cell with its finished run, after which the worker is free, or with None for a rollout."""
        assert self.cell is not None
        cell = self.cell
        try:
            run: dict[str, Any] | None = self.line.recv()
        except EOFError:
            raise LLDSError(f"The worker that made {cell} died; sweep again to go on.") from None
        if run is not None and "error" in run:
            raise LLDSError(f"{cell} failed: {run['error']}")
        if run is not None:
            self.cell = None
        return cell, run

    def dismiss(self) -> None:
        self._process.terminate()
        self._process.join()
        self.line.close()


def _serve(line: Connection, starts: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            cell = Cell(**line.recv())
            try:
                line.send(make_run(Path(starts), cell, lambda row: line.send(None)))
            except (LLDSError, RuntimeError) as error:
                line.send({"error": str(error)})
        except (EOFError, BrokenPipeError):
            return
