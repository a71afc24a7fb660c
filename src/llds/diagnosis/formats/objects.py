"""JSON: one object per line, and the state that transformers' Trainer saves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from llds.diagnosis.formats.rows import Bad, Row, row_of

_LONGEST = 1 << 24


class LineReader:
    """Takes JSON Lines in pieces and yields their rows. ``lines``: lines read so far."""

    def __init__(self) -> None:
        self._rest = b""
        self.lines = 0

    def feed(self, data: bytes) -> Iterator[Row | Bad]:
        """Take the next bytes; yield the row of each line that is complete now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self.lines += 1
            yield from self._read(line)
        if len(self._rest) > _LONGEST:
            yield Bad(self.lines + 1, "the line is too long")
            self._rest = b""

    def close(self) -> Iterator[Row | Bad]:
        """Yield what is left at the end."""
        if self._rest.strip():
            self.lines += 1
            yield from self._read(self._rest)
            self._rest = b""

    def _read(self, line: bytes) -> Iterator[Row | Bad]:
        text = line.decode("utf-8", "replace").strip().lstrip("\ufeff")
        if not text:
            return
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            yield Bad(self.lines, "not JSON")
            return
        if not isinstance(content, dict):
            yield Bad(self.lines, f"not an object but {type(content).__name__}")
            return
        if isinstance(content.get("data"), dict) and "step" in content:
            content = {"step": content["step"], **content["data"]}
        row = row_of(content)
        if row is not None:
            yield row


def read_trainer_state(data: bytes) -> Iterator[Row | Bad]:
    """Yield the rows of a ``trainer_state.json``; of one that was cut, those before the cut."""
    text = data.decode("utf-8", "replace")
    match = re.search(r'"log_history"\s*:\s*\[', text)
    if match is None:
        yield Bad(1, "no log_history")
        return
    decoder, position = json.JSONDecoder(), match.end()
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if position >= len(text) or text[position] == "]":
            return
        try:
            content, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            yield Bad(
                text.count("\n", 0, position) + 1, "the file ends inside an entry, or an entry is damaged"
            )
            return
        row = row_of(content) if isinstance(content, dict) and "train_runtime" not in content else None
        if row is not None:
            yield row
