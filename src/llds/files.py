"""Atomic writes: a reader sees the old file or the new one, never half of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from llds.errors import LLDSError

_TRIES = 5


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path`` through a temporary file in the same folder and ``os.replace``.

    Parent folders are made. Raises ``OSError`` when the folder can't be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
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


def replace_folder(draft: Path, target: Path) -> None:
    """Put the folder ``draft`` at ``target``; an older one there steps aside first and is then removed.

    Raises :class:`LLDSError` when other processes keep putting theirs there.
    """
    aside = draft.with_name(draft.name + ".old")
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
