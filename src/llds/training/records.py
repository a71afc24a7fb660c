"""What a run leaves in its folder: configuration, metrics, events, trajectories, evaluations, the result.

JSON Lines files are appended to and flushed line by line. After a crash the last line may be torn: readers
drop it, and a resumed run cuts away everything written after its checkpoint, so the records read as if
nothing happened.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llds.errors import LLDSError
from llds.files import atomic_write_text, held

# Names of TRL's log on the left, ours on the right; names that are absent here stay as they are.
_CANONICAL = {
    "frac_reward_zero_std": "groups_without_signal",
    "completions/mean_length": "action_tokens",
    "completions/min_length": "action_tokens_min",
    "completions/max_length": "action_tokens_max",
    "clip_ratio/region_mean": "clip_share",
    "clip_ratio/low_mean": "clip_share_low",
    "clip_ratio/high_mean": "clip_share_high",
    "step_time": "seconds",
    "num_tokens": "tokens_seen",
}
# A response here ends with </answer>, not with an end-of-text token, so TRL's counts of truncated ones
# would mislead. The rest are extremes of what is logged, or of the Trainer's own bookkeeping.
_DROPPED = (
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "clip_ratio/low_min",
    "clip_ratio/high_max",
    "epoch",
)


def canonical_metrics(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's log of one step under the names of ``metrics.jsonl``, without what would mislead there."""
    return {
        _CANONICAL.get(name, name): value
        for name, value in logs.items()
        if name not in _DROPPED and not name.startswith(("rewards/", "profiling/")) and value is not None
    }


def what_llds_did(row: Mapping[str, Any]) -> str:
    """Say of a line of ``metrics.jsonl`` whether the penalty was off (λ = 0), active, or zero, and why."""
    if row.get("llds/coef") == 0:
        return "off"
    if row.get("llds/structural_zero") == 1:
        return "structural zero"
    # What is not finite cannot be called zero; in the record it stands as text.
    acted = (
        row.get("llds/penalised_share")
        or row.get("llds/nonfinite_tokens")
        or isinstance(row.get("llds/loss"), str)
    )
    return "active" if acted else "measured zero"


class RunFolder:
    """Paths and records of one run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.evaluations = path / "evaluations"
        self.model = path / "model"
        self.result = path / "result.json"
        self.report = path / "report.html"

    def evaluation(self, name: str) -> Path:
        """Return where the evaluation with this name is kept."""
        return self.evaluations / f"{name}.jsonl"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; raises :class:`LLDSError` when another process trains in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        busy = f"Another process is training in {self.path}; wait for it, or choose another run.name."
        with held(self.path / ".lock", busy):
            yield

    def has_begun(self) -> bool:
        """Say whether a run has results here: what stopped before its first number may be done otherwise."""
        results = (self.metrics, self.checkpoints, self.evaluations, self.model, self.result)
        return self.config.exists() and any(path.exists() for path in results)

    def is_free(self) -> bool:
        """Say whether nothing is here, or no more than a run leaves that stopped before its first number."""
        made = {self.config.name, self.events.name, self.report.name} if self.config.exists() else set()
        own = {".lock"} | made
        return {path.name for path in self.path.iterdir()} <= own

    def event(self, kind: str, **details: Any) -> None:
        """Append an event with the wall-clock time in seconds since 1970."""
        append_line(self.events, {"time": round(time.time(), 3), "event": kind, **details})

    def retriever_event(self, kind: str, details: Mapping[str, Any]) -> None:
        """Append what became of the search tool, as its client tells it."""
        self.event(kind, **details)

    def write_trajectories(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the sampled trajectories of one optimizer step."""
        lines = [_dump(row) for row in rows]
        atomic_write_text(self._trajectory_file(step), "".join(f"{line}\n" for line in lines))

    def cut_after(self, step: int) -> None:
        """Remove metrics and trajectories of optimizer steps after ``step``, and torn last lines."""
        if self.metrics.exists():
            _rewrite(self.metrics, [row for row in read_metrics(self.metrics) if row["step"] <= step])
        if self.events.exists():
            _rewrite(self.events, read_lines(self.events))
        for path in self.trajectories.glob("step-*.jsonl"):
            if path > self._trajectory_file(step):
                path.unlink()

    def set_aside_after(self, step: int, folder: Path) -> None:
        """Move metrics, trajectories and evaluations after optimizer step ``step`` to ``folder``.

        Can be repeated after a crash in the middle.
        """
        folder.mkdir(parents=True, exist_ok=True)
        rows = read_lines(self.metrics) if self.metrics.exists() else []
        undone = [row for row in rows if row["step"] > step]
        if undone:
            atomic_write_text(folder / "metrics.jsonl", "".join(f"{_dump(row)}\n" for row in undone))
        last_rollout = max((row["rollout"] for row in rows if row["step"] <= step), default=0)
        late = [
            *(path for path in self.trajectories.glob("step-*.jsonl") if path > self._trajectory_file(step)),
            *(path for path in self.evaluations.glob("rollout-*.jsonl") if _number_in(path) > last_rollout),
        ]
        for path in late:
            target = folder / path.parent.name / path.name
            target.parent.mkdir(exist_ok=True)
            path.replace(target)
        self.cut_after(step)

    def _trajectory_file(self, step: int) -> Path:
        return self.trajectories / f"step-{step:06d}.jsonl"


def _number_in(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one JSON object as a line and flush it to the operating system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(_dump(row) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file that :func:`append_line` wrote; a torn last line is dropped.

    Raises :class:`LLDSError` when any other line is broken.
    """
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            row = None
        if not isinstance(row, dict):
            raise LLDSError(
                f"{path}, line {number} is not a JSON object; restore the file or delete the run folder."
            )
        rows.append(row)
    return rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl`` as :func:`read_lines` does; every line must say its optimizer step."""
    rows = read_lines(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise LLDSError(
                f'{path}, line {number} has no "step"; restore the file or delete the run folder.'
            )
    return rows


def _rewrite(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    atomic_write_text(path, "".join(f"{_dump(row)}\n" for row in rows))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write one JSON object, atomically."""
    atomic_write_text(path, json.dumps(_finite(content), ensure_ascii=False, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read what :func:`write_json` wrote; raises :class:`LLDSError` when the file is broken."""
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError:
        raise LLDSError(f"{path} is not JSON; restore the file or delete the run folder.") from None
    return content


def _dump(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as the texts "nan", "inf" and "-inf", which JSON has no
    numbers for.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
