"""Text of any shape, by a pattern of the user's with named groups."""

from __future__ import annotations

from collections.abc import Iterator

import regex

from llds.diagnosis.formats.rows import Bad, Row, decimals_of, read_number
from llds.errors import LLDSError

_SECONDS = 0.5
_LONGEST = 1 << 16


class PatternReader:
    """Takes text in pieces and yields a row per line that the pattern matches.

    ``pattern``: a regular expression; the group ``step`` is the step, every other named group a series.
    Raises :class:`LLDSError` for a pattern that is none, has no named group, or takes too long on a line.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise LLDSError(f"--pattern is no regular expression: {error}.") from None
        names = set(self._pattern.groupindex) - {"step"}
        if not names:
            raise LLDSError(
                "--pattern needs named groups, such as '(?P<step>\\d+).*reward=(?P<reward>\\S+)'; it has none "
                "beside step."
            )
        self._rest = b""
        self.lines = 0

    def feed(self, data: bytes) -> Iterator[Row | Bad]:
        """Take the next bytes; yield the row of each line that is complete now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self.lines += 1
            yield from self._read(line)

    def close(self) -> Iterator[Row | Bad]:
        """Yield what is left at the end."""
        if self._rest:
            self.lines += 1
            yield from self._read(self._rest)
            self._rest = b""

    def _read(self, line: bytes) -> Iterator[Row | Bad]:
        text = line[:_LONGEST].decode("utf-8", "replace")
        try:
            match = self._pattern.search(text, timeout=_SECONDS)
        except TimeoutError:
            raise LLDSError(
                f"--pattern took more than {_SECONDS:g} s on line {self.lines}; make it simpler, without nested "
                "repetitions."
            ) from None
        if match is None:
            return
        groups = {name: value for name, value in match.groupdict().items() if value is not None}
        values = {
            name: number for name, value in groups.items() if (number := read_number(value)) is not None
        }
        step = values.pop("step", None)
        if not values:
            yield Bad(self.lines, "the pattern matches, but no group is a number")
            return
        number = int(step) if step is not None and 0 <= step < 2**53 else None
        yield Row(number, values, {name: decimals_of(groups[name]) for name in values})
