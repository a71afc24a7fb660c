"""The folder of an evaluation: its settings, a file of rows per contestant, the summary.

Rows are appended as they come and flushed to the disk, so that whatever was answered stays answered. After
``kill -9`` the last line may be torn: it is cut off. When all tasks are done the file is put in the order of the
tasks, so an evaluation that was interrupted leaves the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llds.errors import LLDSError
from llds.evaluation.rows import AnswerRow, Key, from_json, to_line
from llds.evaluation.tasks import Task
from llds.files import atomic_write_text, held

AGENT = "agent"
_SETTINGS = "settings.json"
_SUMMARY = "summary.json"


class EvalFolder:
    """The folder at ``path``, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def opened(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Hold the folder for this process and these settings.

        Raises :class:`LLDSError` when another process holds it, when it was made with other settings, and when
        something else is in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with held(
            self.path / ".lock",
            f"Another process is writing to {self.path}: wait for it, or give another --out.",
        ):
            self._check(settings)
            yield

    def _check(self, settings: Mapping[str, Any]) -> None:
        kept = self.path / _SETTINGS
        if kept.exists():
            difference = first_difference(self.settings(), settings)
            if difference is not None:
                raise LLDSError(
                    f"{self.path} holds an evaluation with other settings ({difference}): give another --out, or "
                    "delete that folder."
                )
        elif any(entry.name != ".lock" for entry in self.path.iterdir()):
            raise LLDSError(f"{self.path} exists and is no evaluation: give another --out.")
        else:
            atomic_write_text(kept, _pretty(settings))

    def settings(self) -> dict[str, Any]:
        """Return the settings it was made with; raises :class:`LLDSError` when it is no evaluation."""
        return self._read(_SETTINGS)

    def summary(self) -> dict[str, Any]:
        """Return the summary; raises :class:`LLDSError` when the evaluation is not finished."""
        if (self.path / _SETTINGS).exists() and not (self.path / _SUMMARY).exists():
            raise LLDSError(f"The evaluation in {self.path} is not finished: run its llds eval again.")
        return self._read(_SUMMARY)

    def write_summary(self, content: Mapping[str, Any]) -> None:
        """Write the summary, atomically."""
        atomic_write_text(self.path / _SUMMARY, _pretty(content))

    def rows_path(self, contestant: str) -> Path:
        """Return the file of a contestant's rows."""
        return self.path / f"{contestant}.jsonl"

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise LLDSError(f"{self.path} is no evaluation: there is no {name} in it.") from None
        except (ValueError, RecursionError, NotADirectoryError):
            raise LLDSError(
                f"{path} is damaged or no evaluation: delete that folder and run it anew."
            ) from None
        if not isinstance(content, dict):
            raise LLDSError(f"{path} holds no JSON object: delete that folder and run it anew.")
        return content


class Journal:
    """Rows under way. ``path``: where they are kept; None keeps them in memory alone.

    Raises :class:`LLDSError` for a file with a line that is no row.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: dict[Key, AnswerRow] = {}
        self._written: list[Key] = []
        if path is not None and path.exists():
            _cut_torn_line(path)
            self._keep(read_rows(path))

    def pending(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks without a row, and those whose search tool had failed, in order."""
        return [task for task in tasks if (row := self.rows.get(task.key)) is None or row.tool_failed]

    def add(self, rows: Sequence[AnswerRow]) -> None:
        """Keep more rows; they are on the disk when this returns."""
        self._keep(rows)
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(map(to_line, rows)))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, tasks: Sequence[Task]) -> list[AnswerRow]:
        """Return the rows of ``tasks`` in their order, and leave the file in that order."""
        rows = [self.rows[task.key] for task in tasks]
        if self._path is not None and self._written != [task.key for task in tasks]:
            atomic_write_text(self._path, "".join(map(to_line, rows)))
        return rows

    def _keep(self, rows: Sequence[AnswerRow]) -> None:
        self.rows.update((row.key, row) for row in rows)
        self._written += [row.key for row in rows]


def read_rows(path: Path) -> list[AnswerRow]:
    """Return the rows in a file; raises :class:`LLDSError` naming file and line for what is none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LLDSError(f"{path} can't be read ({error.strerror}): check the path.") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            rows.append(from_json(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise LLDSError(
                f"{path}:{number}: the line is no row of an evaluation: restore the file, or delete it to "
                "answer anew."
            ) from None
    return rows


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Say in which setting two evaluations differ first; None when they don't."""
    difference = next(iter(differences(before, now)), None)
    return None if difference is None else "{} is {} there and {} here".format(*difference)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the settings that differ, each as its key and both values as JSON."""
    # As JSON would have them: tuples are lists, and keys are text.
    old, new = _flat(before), _flat(json.loads(json.dumps(now)))
    missing = object()

    def told(side: Mapping[str, Any], key: str) -> str:
        return json.dumps(side[key], ensure_ascii=False) if key in side else "absent"

    return [
        (key, told(old, key), told(new, key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key, missing) != new.get(key, missing)
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _cut_torn_line(path: Path) -> None:
    """Cut off what stands behind the last line feed: the beginning of a row that was being written."""
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _pretty(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"
