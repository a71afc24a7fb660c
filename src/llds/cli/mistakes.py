"""What went wrong outside the program, in one sentence: no traceback where there is nothing to debug."""

from __future__ import annotations

import errno
import os
import re

from llds.errors import LLDSError

_REMEDIES = {
    errno.ENOSPC: "make room, then run the same command again",
    errno.EDQUOT: "make room, then run the same command again",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def sentence_for(error: BaseException) -> str | None:
    """Return one sentence for a mistake or a fault of the machine; None for what is a fault of the program."""
    if isinstance(error, LLDSError):
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        return _of_the_system(error)
    if isinstance(error, ImportError) and "pip install" in str(error):
        return _first_line(error) + "."
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is not installed; run: pip install 'llds[train]'"
    kind = type(error).__name__
    if kind == "SafetensorError":
        # What the disk did to a file of weights comes in this wrapping.
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else 0
        reason = os.strerror(number) if number else _first_line(error)
        return _with_remedy(f"A file of weights can't be read or written: {reason}", number)
    if kind in {"OutOfMemoryError", "MemoryError"}:
        return "The memory is full; lower grpo.micro_batch, sampling.batch or evaluation.batch."
    return None


def _of_the_system(error: OSError) -> str:
    what = error.strerror or _first_line(error)
    where = f"{error.filename}: {what}" if error.filename else what
    return _with_remedy(where, error.errno or 0)


def _with_remedy(text: str, number: int) -> str:
    remedy = _REMEDIES.get(number)
    return f"{text}; {remedy}." if remedy else f"{text}."


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
