"""Rows of a file of questions in any of the shapes that people have: JSON lines, a JSON list, parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llds.data.jsonl import Row, open_packed, read_rows
from llds.errors import LLDSError

PARQUET = "parquet"
JSON_LINES = "JSON lines"
JSON_LIST = "JSON list"

_PARQUET_MAGIC = b"PAR1"
#: Bytes of a JSON list, which has to be read whole.
_LONGEST_LIST = 1 << 30
#: Rows of a parquet file held at a time.
_BATCH = 1024


def read_table(path: str | os.PathLike[str]) -> Iterator[tuple[str, Row]]:
    """Yield ``(where, row)`` for each row; ``where`` is ``file:line``, or ``file, row n`` counted from 1.

    The shape is recognised by the content, not by the name (:func:`shape_of`). JSON lines and parquet are
    streamed. Raises :class:`llds.errors.LLDSError` when the file is missing, damaged, empty, or no such file.
    """
    source = Path(path)
    shape = shape_of(source)
    if shape == PARQUET:
        return _parquet_rows(source)
    return _list_rows(source) if shape == JSON_LIST else read_rows(source)


def shape_of(path: str | os.PathLike[str]) -> str:
    """Return :data:`PARQUET`, :data:`JSON_LIST` or :data:`JSON_LINES`, by the first bytes of the file."""
    with open_packed(Path(path)) as file:
        start = file.read(4096)
    if start.startswith(_PARQUET_MAGIC):
        return PARQUET
    return JSON_LIST if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[") else JSON_LINES


def _list_rows(source: Path) -> Iterator[tuple[str, Row]]:
    with open_packed(source) as file:
        text = file.read(_LONGEST_LIST + 1)
    if len(text) > _LONGEST_LIST:
        raise LLDSError(f"{source} is a JSON list of over 1 GiB: write one JSON object on each line instead.")
    try:
        rows = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise LLDSError(f"{source} isn't UTF-8 text: convert the file to UTF-8.") from None
    except (RecursionError, ValueError) as error:
        reason = (
            f"{error.msg} at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "too deep"
        )
        raise LLDSError(f"{source} isn't valid JSON ({reason}): write a list of objects.") from None
    if not rows:
        raise LLDSError(f"{source} holds no rows: give a file with at least one question.")
    for number, row in enumerate(rows, start=1):
        where = f"{source}, row {number}"
        if not isinstance(row, dict):
            raise LLDSError(f"{where}: the row is not a JSON object: write it as {{...}}.")
        yield where, row


def _parquet_rows(source: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(source) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{source}, row {number}", row
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, LLDSError):
            raise
        reason = str(error).splitlines()[0]
        raise LLDSError(
            f"{source} can't be read as parquet after row {number} ({reason[:200]}): fetch the file again."
        ) from None
    if not number:
        raise LLDSError(f"{source} holds no rows: give a file with at least one question.")


def plain(value: Any) -> Any:
    """Return a value of a row as plain JSON, for messages and metadata: bytes and dates become text."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
