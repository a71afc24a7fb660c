"""Going back to a checkpoint after an alarm, so that a crash in the middle loses nothing.

What is undone is not thrown away: its metrics, trajectories and evaluations move to ``rolled-back/N`` in the
run's folder. ``rollbacks.json`` says how often the run went back, from where to where, and with which λ it
goes on; it is written first, so a run that dies in between finishes the job when it is taken up again.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from llds.errors import LLDSError
from llds.training.checkpoints import checkpoint_step, list_checkpoints
from llds.training.records import RunFolder, read_json, write_json


@dataclass(frozen=True)
class Rollback:
    """One time that the run went back. ``coef``: λ from then on. ``done``: everything was put aside."""

    from_step: int
    to_step: int
    coef: float
    reason: str
    done: bool = False


class Rollbacks:
    """The rollbacks of a run, in order."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._path = run.path / "rollbacks.json"
        self._entries = self._read()

    def _read(self) -> list[Rollback]:
        if not self._path.exists():
            return []
        try:
            return [Rollback(**entry) for entry in read_json(self._path)["rollbacks"]]
        except (KeyError, TypeError):
            raise LLDSError(f"{self._path} is damaged; restore it or delete the run folder.") from None

    def __len__(self) -> int:
        return len(self._entries)

    def coef(self, otherwise: float) -> float:
        """Return λ as the last rollback left it."""
        return self._entries[-1].coef if self._entries else otherwise

    def go_back(self, from_step: int, to_step: int, coef: float, reason: str) -> None:
        """Note a rollback and carry it out."""
        self._entries.append(Rollback(from_step, to_step, coef, reason))
        self._write()
        self.finish()

    def finish(self) -> None:
        """Carry out what a crash left undone, if anything."""
        if not self._entries or self._entries[-1].done:
            return
        last = self._entries[-1]
        for path in list_checkpoints(self._run.checkpoints):
            if checkpoint_step(path) > last.to_step:
                shutil.rmtree(path)
        self._run.set_aside_after(last.to_step, self._run.path / "rolled-back" / str(len(self._entries)))
        self._entries[-1] = Rollback(**{**asdict(last), "done": True})
        self._write()

    def _write(self) -> None:
        write_json(self._path, {"rollbacks": [asdict(entry) for entry in self._entries]})


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the optimizer steps of the checkpoints in ``folder``, oldest first."""
    return [checkpoint_step(path) for path in list_checkpoints(folder)]
