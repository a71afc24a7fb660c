"""Rows of a JSON-lines file, plain, gzip or zstd, with errors that name the file, the line and the remedy."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from llds.data import zstd
from llds.errors import LLDSError

Row = dict[str, Any]

_GZIP_MAGIC = b"\x1f\x8b"
_LONGEST_LINE = 64 << 20  # bytes; a file that unpacks to one endless line must not fill the memory


def read_rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, Row]]:
    """Yield ``(where, row)`` for each line that isn't blank; ``where`` is ``file:line``, counted from 1.

    Gzip and zstd are recognised by their first bytes, not by the name. The file is streamed: a corpus of many
    gigabytes is read in constant memory. Raises :class:`llds.errors.LLDSError` when the file is missing,
    holds no rows, is cut short, isn't UTF-8, or has a line that isn't one JSON object or is over 64 MiB.
    """
    source = Path(path)
    found = False
    for number, line in _lines(source):
        if line.strip():
            found = True
            where = f"{source}:{number}"
            yield where, _parse(line, where)
    if not found:
        raise LLDSError(f"{source} holds no rows: give a file with one JSON object on each line.")


def count_lines(path: str | os.PathLike[str]) -> int:
    """Return the number of lines of ``path``, unpacked; raises as :func:`read_rows` where it can't be read."""
    source = Path(path)
    count = 0
    with _told(source, lambda: count), _open(source) as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
    return count


def text_field(row: Row, key: str, where: str) -> str:
    """Return ``row[key]``, a string with something in it; as ``id`` a whole number will do."""
    if key not in row:
        raise LLDSError(f'{where}: the row has no "{key}" (it has {_names(row)}): add it to the row.')
    value = row[key]
    if key == "id" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return checked_text(value, f'"{key}"', where)


def checked_text(value: object, name: str, where: str) -> str:
    """Return ``value`` if it is a string that isn't blank and fits UTF-8; ``name`` is for the message."""
    if not isinstance(value, str):
        raise LLDSError(f"{where}: {name} must be a string, not {kind_of(value)}: put it in quotes.")
    if not value.strip():
        raise LLDSError(f"{where}: {name} is empty: fill it in or drop the row.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise LLDSError(
            f"{where}: {name} holds half of a surrogate pair: write the character whole."
        ) from None
    return value


@contextmanager
def open_packed(source: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, unpacked where it is gzip or zstd; raises as :func:`read_rows` where it can't be."""
    with _told(source, lambda: 0), _open(source) as file:
        yield file


def _lines(source: Path) -> Iterator[tuple[int, str]]:
    number = 0
    with _told(source, lambda: number), _open(source) as file:
        for number, raw in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), start=1):
            if len(raw) > _LONGEST_LINE:
                raise LLDSError(
                    f"{source}:{number}: the line is longer than {_LONGEST_LINE >> 20} MiB: write one "
                    "JSON object on each line."
                )
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise LLDSError(
                    f"{source}:{number}: the line isn't UTF-8 text: convert the file to UTF-8."
                ) from None
            yield number, line


@contextmanager
def _told(source: Path, line: Callable[[], int]) -> Iterator[None]:
    """Turn what may go wrong when reading ``source`` into sentences; ``line`` says how far it was read."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, zstd.Damaged):
        raise LLDSError(
            f"{source}: the compressed stream breaks off or is damaged after line {line()}: fetch the file again."
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise LLDSError(f"{source} can't be read ({reason}): check the path and its permissions.") from None


def _open(source: Path) -> IO[bytes]:
    with source.open("rb") as file:
        first = file.read(4)
    if first[:2] == _GZIP_MAGIC:
        return gzip.open(source, "rb")  # type: ignore[return-value]
    return zstd.open_zstd(source) if first == zstd.MAGIC else source.open("rb")


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise LLDSError(
            f"{where}: the line isn't valid JSON ({error.msg} at column {error.colno}): "
            "write one JSON object on each line."
        ) from None
    except (RecursionError, ValueError):
        raise LLDSError(
            f"{where}: the line is nested too deeply or holds a number too long: simplify it."
        ) from None
    if not isinstance(row, dict):
        raise LLDSError(f"{where}: the line is {kind_of(row)}, not a JSON object: write it as {{...}}.")
    return row


def kind_of(value: object) -> str:
    """Return in words what a JSON value is."""
    if value is None:
        return "null"
    names = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _names(row: Row) -> str:
    return ", ".join(f'"{key}"' for key in list(row)[:8]) or "no keys"
