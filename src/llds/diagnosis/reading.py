"""Logs of any shape into one table: from files, folders and standard input, compressed or not."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from llds.diagnosis.building import TableBuilder
from llds.diagnosis.formats.console import ConsoleReader, has_mark
from llds.diagnosis.formats.events import masked_crc, read_events
from llds.diagnosis.formats.objects import LineReader, read_trainer_state
from llds.diagnosis.formats.pattern import PatternReader
from llds.diagnosis.formats.rows import Bad, Row, read_number
from llds.diagnosis.formats.tables import read_table
from llds.diagnosis.table import Column, Table
from llds.diagnosis.vocabulary import STEP_KEYS
from llds.errors import LLDSError
from llds.files import atomic_write_bytes

#: Name of a format -> what it is.
FORMATS = {
    "console": "console output of verl or TRL, W&B's output.log",
    "jsonl": "one JSON object per line, ms-swift's logging.jsonl and llds runs among them",
    "csv": "a table, such as W&B's CSV export",
    "trainer-state": "trainer_state.json of transformers and TRL",
    "tensorboard": "an event file of TensorBoard",
    "pattern": "any text, by --pattern",
}
_BLOCK = 1 << 22
_HEAD = 1 << 20
_LARGEST_WHOLE = 1 << 31
_MAGIC: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
Progress = Callable[[int], None]


def read_logs(
    sources: Sequence[str | Path | BinaryIO],
    *,
    format: str | None = None,
    pattern: str | None = None,
    progress: Progress | None = None,
) -> Table:
    """Read logs into one table.

    ``sources``: files, folders, or ``-`` for standard input; several are one resumed run, in this order, and
    where they overlap the later one counts. ``format``: a key of :data:`FORMATS`; found out when None.
    ``pattern``: for text of another shape, a regular expression with named groups. ``progress``: called with
    the bytes read of each block.

    Raises :class:`LLDSError` for a source that can't be read, a format that does not exist, and logs in which
    no row is found. A damaged line is counted in the table, never fatal.
    """
    if format is not None and format not in FORMATS:
        raise LLDSError(f"There is no format {format!r}; there are {', '.join(FORMATS)}.")
    if (format == "pattern") != (pattern is not None) and format is not None:
        raise LLDSError("--format pattern and --pattern belong together; give both, or --pattern alone.")
    if not sources:
        raise LLDSError("No log was given; name a file or a folder, or - for standard input.")
    builder, kinds = TableBuilder(), []
    for source in sources:
        for name, stream in _opened(source, builder):
            with stream:
                builder.open(name)
                kinds.append(_read(stream, name, builder, format, pattern, progress or (lambda _: None)))
    if not len(builder):
        raise LLDSError(_nothing_found(builder, kinds))
    return builder.table(kinds[-1][0], next((engine for _, engine in kinds if engine), ""))


def _nothing_found(builder: TableBuilder, kinds: list[tuple[str, str]]) -> str:
    table = builder.table("none")
    where = ", ".join(table.files)
    looked = ", ".join(sorted({kind for kind, _ in kinds}))
    damage = ""
    if table.damaged:
        first = table.damaged[0]
        damage = f" ({table.damaged_count} damaged lines, the first in line {first.line}: {first.reason})"
    return (
        f"No step was found in {where}, read as {looked}{damage}. Say what it is with --format "
        f"({', '.join(FORMATS)}), or give --pattern '(?P<step>\\d+).*reward=(?P<reward>\\S+)'."
    )


# --- sources


def _opened(source: str | Path | BinaryIO, builder: TableBuilder) -> Iterator[tuple[str, IO[bytes]]]:
    if not isinstance(source, str | Path):
        yield getattr(source, "name", "input"), _unpacked(source, "input")
        return
    if str(source) == "-":
        yield "standard input", _unpacked(sys.stdin.buffer, "standard input")
        return
    path = Path(source)
    if path.is_dir():
        paths = find_logs(path)
        builder.notes.append(f"Of the folder {path} these were read: {', '.join(p.name for p in paths)}.")
    else:
        paths = [path]
    for one in paths:
        try:
            stream = one.open("rb")
        except OSError as error:
            raise LLDSError(f"{one} can't be read: {error.strerror or error}.") from None
        yield str(one), _unpacked(stream, str(one))


def _unpacked(stream: BinaryIO, name: str) -> IO[bytes]:
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast(Any, stream))
    head = buffered.peek(6)[:6]
    for magic, opener in _MAGIC.items():
        if head.startswith(magic):
            return cast(IO[bytes], opener(buffered, "rb"))
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        raise LLDSError(f"{name} is packed by zstd; unpack it first: zstd -d {name}")
    return buffered


#: What is looked for in a folder, best first; all that match the first pattern are read.
_IN_FOLDER = (
    *("metrics.jsonl", "trainer_state.json", "checkpoint-*/trainer_state.json", "logging.jsonl"),
    *("**/logging.jsonl", "output.log", "files/output.log", "**/files/output.log", "**/trainer_state.json"),
    *("**/events.out.tfevents*", "*.log", "*.log.gz", "*.jsonl", "*.csv", "**/*.log", "**/metrics.jsonl"),
)


def find_logs(folder: Path) -> list[Path]:
    """Return the logs of a folder: of the first shape that is there. Raises :class:`LLDSError` if none is."""
    for pattern in _IN_FOLDER:
        found = sorted((path for path in folder.glob(pattern) if path.is_file()), key=_age)
        if found:
            # Each checkpoint's state holds all of those before.
            return found[-1:] if "trainer_state" in pattern else found
    raise LLDSError(f"{folder} holds no log that is known ({', '.join(_IN_FOLDER[:8])}, …); name the file.")


def _age(path: Path) -> tuple[int, float, str]:
    number = re.search(r"checkpoint-(\d+)", str(path))
    return int(number.group(1)) if number else -1, path.stat().st_mtime, str(path)


# --- formats


def _read(
    stream: IO[bytes],
    name: str,
    builder: TableBuilder,
    format: str | None,
    pattern: str | None,
    progress: Progress,
) -> tuple[str, str]:
    """Read one source; return its format and its engine, empty if that shows from the keys alone."""
    blocks = _blocks(stream, name, builder, progress)
    head = _head(blocks)
    kind = format or ("pattern" if pattern is not None else detect(head, name))
    everything = _chain(head, blocks)
    engine = ""
    if kind == "pattern":
        _feed(PatternReader(pattern or ""), everything, builder)
    elif kind == "console":
        engine = _read_console(everything, builder)
    elif kind == "jsonl":
        _feed(LineReader(), everything, builder)
        engine = "ms-swift" if b'"global_step/max_steps"' in head else ""
    elif kind == "csv":
        _add_all(read_table(_text_lines(everything)), builder)
    else:
        data = b"".join(everything)
        _add_all(read_trainer_state(data) if kind == "trainer-state" else read_events(data), builder)
        engine = "trl" if kind == "trainer-state" else ""
    return kind, engine


def _blocks(stream: IO[bytes], name: str, builder: TableBuilder, progress: Progress) -> Iterator[bytes]:
    # What is left of a torn archive comes with read1 alone.
    take = getattr(stream, "read1", stream.read)
    while True:
        try:
            block = take(_BLOCK)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            builder.add(Bad(0, f"the file can't be unpacked or read any further: {error}"))
            return
        if not block:
            return
        progress(len(block))
        yield block


def _head(blocks: Iterator[bytes]) -> bytes:
    head = b""
    for block in blocks:
        head += block
        if len(head) >= _HEAD:
            break
    return head


def _chain(head: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    if head:
        yield head
    yield from blocks


def _feed(reader: LineReader | PatternReader, blocks: Iterable[bytes], builder: TableBuilder) -> None:
    for block in blocks:
        for row in reader.feed(block):
            builder.add(row, reader.lines)
    for row in reader.close():
        builder.add(row, reader.lines)
    builder.lines_read += reader.lines


def _read_console(blocks: Iterable[bytes], builder: TableBuilder) -> str:
    """Read a console log; of the two kinds of rows in it the one counts that is there more often."""
    reader = ConsoleReader()
    rows: list[tuple[str, Row | Bad, int]] = []
    for block in blocks:
        rows += [(kind, row, reader.lines) for kind, row in reader.feed(block)]
    rows += [(kind, row, reader.lines) for kind, row in reader.close()]
    for kind, row, line in rows:
        if kind == reader.kind:
            builder.add(row, line)
    builder.lines_read += reader.lines
    return reader.kind if rows else ""


def _add_all(rows: Iterable[Row | Bad], builder: TableBuilder) -> None:
    count = 0
    for row in rows:
        count += 1
        builder.add(row, row.line if isinstance(row, Bad) else count + 1)
    builder.lines_read += count


def _text_lines(blocks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").replace("\x00", "") + "\n"
    if rest:
        yield rest.decode("utf-8", "replace").replace("\x00", "")


def detect(head: bytes, name: str = "") -> str:
    """Tell the format of a log from its first megabyte, at most."""
    if len(head) >= 12 and masked_crc(head[:8]) == int.from_bytes(head[8:12], "little"):
        return "tensorboard"
    if "tfevents" in Path(name).name:
        return "tensorboard"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"{") and b'"log_history"' in text:
        return "trainer-state"
    first, _, rest = text.partition(b"\n")
    if first.startswith(b"{") and _is_json(first):
        return "jsonl"
    if not has_mark(first) and _is_table(first, rest):
        return "csv"
    return "console"


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _is_table(first: bytes, rest: bytes) -> bool:
    head = first.decode("utf-8", "replace")
    delimiter = max(",\t;", key=head.count)
    second = rest.partition(b"\n")[0].decode("utf-8", "replace")
    if head.count(delimiter) == 0:
        return False
    try:
        names, cells = (next(csv.reader([line], delimiter=delimiter), []) for line in (head, second))
    except csv.Error:
        return False
    if len(names) != len(cells):
        return False
    has_step = any(name.strip() in STEP_KEYS for name in names)
    figures = sum(read_number(cell) is not None for cell in cells)
    texts = sum(read_number(name) is None for name in names)
    return texts == len(names) and (has_step or figures >= 0.5 * len(cells))


# --- writing


def write_table(table: Table, path: Path) -> None:
    """Write the canonical table as Parquet or CSV, by the suffix of ``path``.

    Raises :class:`LLDSError` for another suffix, or when Parquet needs a package that is missing.
    """
    if path.suffix == ".csv":
        atomic_write_bytes(path, table_csv(table).encode("utf-8"))
    elif path.suffix == ".parquet":
        atomic_write_bytes(path, _parquet(table))
    else:
        raise LLDSError(f"The table can be written as .csv or .parquet, not as '{path.name}'.")


def table_csv(table: Table) -> str:
    """Return the canonical table as CSV: step, then one column per series; empty where there is no value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(table.columns)
    writer.writerow(["step", *names])
    for index, step in enumerate(table.steps.tolist()):
        writer.writerow([step, *(_cell(table.columns[name], index) for name in names)])
    return out.getvalue()


def _cell(column: Column, index: int) -> str:
    value = float(column.values[index])
    return "" if math.isnan(value) and not column.unreadable[index] else repr(value)


def _parquet(table: Table) -> bytes:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise LLDSError("Parquet needs pyarrow: pip install pyarrow; or write a .csv.") from None
    arrays = {"step": pa.array(table.steps)}
    arrays |= {name: pa.array(column.values) for name, column in table.columns.items()}
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(arrays), out)
    return bytes(out.getvalue())


# --- following


class LogFollower:
    """Takes a growing log in pieces and keeps its table; what ``llds watch`` reads with.

    ``format``: "console", "jsonl" or "pattern"; found out from the first complete line when None.
    """

    def __init__(self, name: str, format: str | None = None, pattern: str | None = None) -> None:
        self._pattern = pattern
        self._format = "pattern" if pattern is not None else format
        self._reader: ConsoleReader | LineReader | PatternReader | None = None
        self._early = b""
        self._name = name
        self.builder = TableBuilder()
        self.builder.open(name)

    def feed(self, data: bytes) -> int:
        """Take the next bytes; return the number of rows that are there now."""
        if self._reader is None:
            self._early += data
            if b"\n" not in self._early:
                return 0
            self._reader = self._make_reader()
            data, self._early = self._early, b""
        for row in self._reader.feed(data):
            self.builder.add(row[1] if isinstance(row, tuple) else row, self._reader.lines)
        self.builder.lines_read = self._reader.lines
        return len(self.builder)

    def close(self) -> int:
        """Take what is left as the last line."""
        if self._reader is None and self._early:
            self.feed(b"\n")
        for row in self._reader.close() if self._reader else ():
            self.builder.add(
                row[1] if isinstance(row, tuple) else row, self._reader.lines if self._reader else 0
            )
        return len(self.builder)

    def _make_reader(self) -> ConsoleReader | LineReader | PatternReader:
        kind = self._format or detect(self._early, self._name)
        self._format = kind
        if kind == "pattern":
            return PatternReader(self._pattern or "")
        if kind == "jsonl":
            return LineReader()
        if kind == "console":
            return ConsoleReader()
        raise LLDSError(f"{self._name} is of the format {kind}, which can't be followed; use llds diagnose.")

    def table(self) -> Table:
        """Return what was read so far."""
        engine = self._reader.kind if isinstance(self._reader, ConsoleReader) else ""
        return self.builder.table(self._format or "console", engine)
