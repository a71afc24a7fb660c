"""Following a log as it grows, and telling of a change of verdict as it happens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llds.diagnosis.findings import Diagnosis, Finding
from llds.diagnosis.reading import LogFollower
from llds.diagnosis.signals import find_signals
from llds.diagnosis.table import Table
from llds.diagnosis.verdict import diagnose
from llds.errors import LLDSError

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Change:
    """A verdict that is new. ``step``: of the row that brought it; ``before``: the verdict until then."""

    step: int
    before: str
    diagnosis: Diagnosis

    @property
    def is_alarm(self) -> bool:
        """Whether it is worse than worth a word."""
        return self.diagnosis.severity in {"warning", "critical"}


class Watcher:
    """Asks for a diagnosis whenever there is a new row. ``latest``: the last one."""

    def __init__(self) -> None:
        self._rows = 0
        self.latest: Diagnosis | None = None

    def look(self, table: Table) -> Iterator[Change]:
        """Yield the changes of verdict since the last look, row by row."""
        # A resumed run takes rows back.
        self._rows = min(self._rows, len(table))
        while self._rows < len(table):
            self._rows += 1
            now = diagnose(table.head(self._rows))
            before = self.latest
            self.latest = now
            if before is None or (now.verdict, now.severity) != (before.verdict, before.severity):
                told = before.verdict if before else "none"
                yield Change(int(table.steps[self._rows - 1]), told, now)


def replay(table: Table) -> list[Change]:
    """Return what a watcher would have told while the log was written."""
    return list(Watcher().look(table))


@dataclass(frozen=True)
class Lead:
    """How early a watcher was. ``alarm_step``: of the first alarm; ``visible_step``: at which the fall of the reward
    or the surge of the gradient could be seen by the same rules; None where there was none.
    """

    alarm_step: int | None
    alarm_kind: str | None
    visible_step: int | None

    @property
    def steps(self) -> int | None:
        """Steps from the first alarm to the visible trouble; negative when it came later."""
        if self.alarm_step is None or self.visible_step is None:
            return None
        return self.visible_step - self.alarm_step


def lead_of(table: Table) -> Lead:
    """Replay a whole log, and compare its first alarm with the trouble that anybody can see."""
    alarm = next((change for change in replay(table) if change.is_alarm), None)
    return Lead(
        alarm.step if alarm else None, alarm.diagnosis.verdict if alarm else None, visible_trouble(table)
    )


def visible_trouble(table: Table) -> int | None:
    """Return the step at which a fall of the reward or a surge of the gradient has lasted; None without one.

    Only in a run that ends badly: what comes back is no trouble.
    """
    if diagnose(table).severity not in {"warning", "critical"}:
        return None
    signals = find_signals(table)
    names = [
        name for name in ("reward down", "validation down") if signals.is_on(name) and signals.holds(name)
    ]
    names += [name for name in ("gradient up",) if signals.is_on(name)]
    return min((signals.step(signals.noticed(name)) for name in names), default=None)


def follow(
    path: Path,
    told: Callable[[Change], None],
    *,
    format: str | None = None,
    pattern: str | None = None,
    until_idle: float | None = None,
    pause: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Diagnosis | None:
    """Follow a file until nothing came for ``until_idle`` seconds, for ever when None; return the last diagnosis.

    The file may not be there yet. When it becomes shorter or another file takes its place, it is read anew. Raises
    :class:`LLDSError` for a folder, and for a format that can't be followed.
    """
    if path.is_dir():
        raise LLDSError(f"{path} is a folder; name the log in it that grows.")
    watcher, log = Watcher(), LogFollower(str(path), format, pattern)
    position, identity, last = 0, None, clock()
    while True:
        status = _status(path)
        if status is not None:
            same = identity in (None, status[0])
            if not same or status[1] < position:
                watcher, log, position = Watcher(), LogFollower(str(path), format, pattern), 0
            identity = status[0]
            if status[1] > position:
                position = _take(path, position, log)
                last = clock()
                for change in watcher.look(log.table()):
                    told(change)
        if until_idle is not None and clock() - last >= until_idle:
            log.close()
            for change in watcher.look(log.table()):
                told(change)
            return watcher.latest
        sleep(pause)


def _status(path: Path) -> tuple[int, int] | None:
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_ino, about.st_size


def _take(path: Path, position: int, log: LogFollower) -> int:
    with path.open("rb") as file:
        file.seek(position)
        while block := file.read(_BLOCK):
            position += len(block)
            log.feed(block)
    return position


def change_text(change: Change) -> str:
    """Return a change as a line for people."""
    now = change.diagnosis
    first: Finding | None = now.findings[0] if now.findings else None
    evidence = (
        f": {first.signals[0].evidence}" if first is not None and first.signals and change.is_alarm else ""
    )
    onset = f", from step {now.onset_step} on" if now.onset_step is not None else ""
    return (
        f"step {change.step}: {now.severity.upper()} {now.verdict}{onset} (before: {change.before}){evidence}"
    )
