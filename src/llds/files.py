"""Atomic writes: a reader sees the old file or folder or the new one, never half of it.

What is being written lies beside its target under a hidden name that ends in ``.tmp``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llds.errors import LLDSError

_TRIES = 20
# A draft this old was left by a process that was killed. Seconds.
_ABANDONED = 24 * 3600


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path`` through a temporary file in the same folder and ``os.replace``.

    Parent folders are made. Raises ``OSError`` when the folder can't be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8; see :func:`atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode("utf-8"))


@contextmanager
def held(lock: Path, busy: str) -> Iterator[None]:
    """Hold the file ``lock`` for this process alone while the block runs; it is made, and stays.

    Raises :class:`LLDSError` with the sentence ``busy`` when another process holds it, ``OSError`` when it can't be
    made. What a killed process held is free again.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LLDSError(busy) from None
        yield


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new folder beside ``path`` that takes its place, replacing it, when the block ends well.

    Several processes may write the same folder: each has a draft of its own, and the last one stays. Raises
    ``OSError`` when the folder can't be written, :class:`LLDSError` when it can't be replaced.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    draft.mkdir()
    try:
        yield draft
        replace_folder(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove the drafts in ``folder`` and below. Nobody else may be writing there."""
    for path in list(folder.rglob(".*.tmp")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _remove_abandoned(target: Path) -> None:
    for path in target.parent.glob(f".{target.name}.*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


def replace_folder(draft: Path, target: Path) -> None:
    """Put ``draft``, once it is on disk, at ``target``; an older folder there steps aside and is then removed.

    Raises :class:`LLDSError` when other processes keep putting theirs there.
    """
    for file in draft.rglob("*"):
        if file.is_file():
            _flush_to_disk(file)
    aside = draft.with_name(f"{draft.name.removesuffix('.tmp')}.old.tmp")
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            os.replace(target, aside)
        shutil.rmtree(aside, ignore_errors=True)
        # Fails when another process has just put its own folder there: then that one steps aside.
        with suppress(OSError):
            os.replace(draft, target)
            return
    raise LLDSError(
        f"{target} can't be written: another process keeps writing there, or the folder is in use."
    )


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
