"""Console logs: verl's ``step:12 - key:value - …`` lines and the dicts that TRL prints, among anything else.

Lines that hold neither are skipped by a search over bytes, so a log of printed samples is read as fast as it
can be loaded. A terminal or a pipe may have broken a line inside a key or a number, or left a dangling `` -``
at its end: then the next line is joined to it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from llds.diagnosis.formats.rows import Bad, Row, decimals_of, read_number, row_of

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"^\s*\((?:[\w.:-]+ )?(?:pid|ip)=[^)]*\)\s?")
_VERL = re.compile(r"(?:^|[\s|\]])(step:\d+(?: - |\s*-?\s*$))")
_PAIR = re.compile(r"^[^\s:{}\[\]'\"][^:{}\[\]'\"]*(?::[^:{}\[\]'\"]+)*:\S.*$")
_KEY = re.compile(r"^[\w/@.+%\-()=, *]+$")
_TQDM = re.compile(r"(\d+)/(\d+) \[")
_LONGEST = 1 << 20
#: What a line must hold to be looked at. Each is found by a search for plain bytes, which is fastest.
_KEYS = (b"loss", b"reward", b"grad_norm")
MARKS = (b"step:", *(quote + key + quote for key in _KEYS for quote in (b"'", b'"')))


class _Marks:
    """Finds the next mark in a block, looking for each only once."""

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._next = {mark: block.find(mark) for mark in MARKS}

    def after(self, position: int) -> int:
        """Return where the next mark at or after ``position`` is, −1 if there is none."""
        first = -1
        for mark, place in self._next.items():
            while 0 <= place < position or (place >= 0 and mark == b"step:" and not self._counts(place)):
                place = self._block.find(mark, max(position, place + 1))
            self._next[mark] = place
            if place >= 0 and (first < 0 or place < first):
                first = place
        return first

    def _counts(self, place: int) -> bool:
        return self._block[place + 5 : place + 6].isdigit()


def has_mark(text: bytes) -> bool:
    """Say whether a text holds anything that may be a row."""
    return _Marks(text).after(0) >= 0


class ConsoleReader:
    """Takes a console log in pieces and yields its rows.

    ``kind``: "verl" or "trl", by what was found so far. Feed it with :meth:`feed`, then call :meth:`close`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._pending: tuple[int, str] | None = None
        self._line = 0
        self._progress: int | None = None
        self.found = {"verl": 0, "trl": 0}

    @property
    def kind(self) -> str:
        """Which engine's rows there are more of."""
        return "trl" if self.found["trl"] > self.found["verl"] else "verl"

    @property
    def lines(self) -> int:
        """Lines read so far."""
        return self._line

    def feed(self, data: bytes) -> Iterator[tuple[str, Row | Bad]]:
        """Take the next bytes; yield the kind and the row of each line that is complete now."""
        text = self._rest + data
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rest = text[end:]
        if len(self._rest) > _LONGEST and not has_mark(self._rest):
            self._rest = b""
        yield from self._block(text[:end])

    def close(self) -> Iterator[tuple[str, Row | Bad]]:
        """Yield what is left at the end."""
        if self._rest:
            yield from self._block(self._rest + b"\n")
            self._rest = b""
        yield from self._flush()

    def _block(self, block: bytes) -> Iterator[tuple[str, Row | Bad]]:
        """Go through complete lines; all but those with a mark, and those after one, are only counted."""
        position, marks = 0, _Marks(block)
        while position < len(block):
            if self._pending is None:
                place = marks.after(position)
                if place < 0:
                    break
                start = max(block.rfind(b"\n", position, place), block.rfind(b"\r", position, place))
                start = position if start < 0 else start + 1
                self._line += block.count(b"\n", position, start)
                position = start
            end = _line_end(block, position)
            yield from self._take(block[position:end])
            self._line += block[end : end + 1] == b"\n"
            position = end + 1
        self._line += block.count(b"\n", position)

    def _take(self, raw: bytes) -> Iterator[tuple[str, Row | Bad]]:
        line = clean(raw[:_LONGEST].decode("utf-8", "replace"))
        verl = _VERL.search(line)
        if verl is None and self._pending is not None:
            number, pending = self._pending
            joined = _joined(pending, line)
            if joined is not None:
                self._pending = (number, joined)
                return
        yield from self._flush()
        if verl is not None:
            self._pending = (self._line + 1, line[verl.start(1) :])
        elif "{" in line:
            yield from self._dict(line)

    def _flush(self) -> Iterator[tuple[str, Row | Bad]]:
        if self._pending is None:
            return
        (number, text), self._pending = self._pending, None
        self.found["verl"] += 1
        yield "verl", verl_row(text, number)

    def _dict(self, line: str) -> Iterator[tuple[str, Row | Bad]]:
        for match in _TQDM.finditer(line):
            self._progress = int(match.group(1))
        start = line.find("{")
        end = line.rfind("}")
        content = read_dict(line[start : end + 1]) if end > start else None
        if content is None:
            looks_cut = end <= start and "'loss'" in line
            if looks_cut:
                yield "trl", Bad(self._line + 1, "a dict that does not end")
            return
        if "train_runtime" in content or not any(key in content for key in _TRL_KEYS):
            return
        row = row_of(content)
        if row is not None:
            self.found["trl"] += 1
            yield "trl", row


_TRL_KEYS = ("loss", "reward", "grad_norm", "kl", "completion_length", "global_step/max_steps", "eval_reward")


def clean(line: str) -> str:
    """Take colours, Ray's prefixes and what a progress bar overwrote from a line."""
    line = _ANSI.sub("", line)
    before = None
    while before != line:
        before, line = line, _PREFIX.sub("", line)
    return line


def verl_row(text: str, number: int) -> Row | Bad:
    """Read ``step:12 - key:value - …``; pieces that are no numbers are left out."""
    pieces = text.split(" - ")
    step = read_number(pieces[0].partition(":")[2].strip(" -"))
    if step is None:
        return Bad(number, "no step")
    values: dict[str, float] = {}
    decimals: dict[str, int | None] = {}
    unread = 0
    for piece in pieces[1:]:
        key, colon, value = piece.strip().strip("-").strip().rpartition(":")
        # NumPy's wrapper has no colon in it, so the last colon ends the key.
        figure = read_number(value) if colon else None
        if figure is None or not _KEY.match(key):
            unread += bool(piece.strip(" -"))
            continue
        values[key] = figure
        decimals[key] = decimals_of(value)
    if not values:
        return Bad(number, f"no number can be read in {text[:60]!r}")
    if unread > len(values):
        return Bad(number, f"{unread} of {unread + len(values)} values can't be read in {text[:60]!r}")
    return Row(int(step), values, decimals)


def read_dict(text: str) -> dict[str, object] | None:
    """Read a dict as Python or JSON prints it, nan and inf included; None if it is none."""
    text = re.sub(r"\b(?:np|numpy)\.\w+\(([^()]*)\)", r"\1", text)
    text = re.sub(r"(?<![\w'\"./-])(-?)(nan|inf|NaN|Infinity)(?![\w'\"])", r"'\1\2'", text)
    text = re.sub(r":\s*(true|false|null)\b", lambda m: ": " + _JSON_WORDS[m.group(1)], text)
    try:
        content = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
    is_plain = isinstance(content, dict) and all(isinstance(key, str) for key in content)
    return content if is_plain else None


_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}


def _joined(pending: str, line: str) -> str | None:
    """Return ``pending`` with ``line`` behind it, if ``line`` goes on where ``pending`` was broken off."""
    following = line.strip("\r\n")
    pieces = [piece for piece in following.split(" - ") if piece.strip(" -")]
    if not pieces or len(pending) > _LONGEST:
        return None
    if pending.rstrip().endswith(" -"):
        return f"{pending.rstrip()} {following.strip()}" if _is_pair(pieces[0]) else None
    last = pending.split(" - ")[-1]
    whole = _is_pair(last)
    rest = pieces[1:]
    if not whole and (_is_pair(last + pieces[0]) or (rest and _is_pair(rest[0]))):
        return pending + following
    # Broken inside a number: what follows is the rest of it, and then further pairs.
    if (
        whole
        and rest
        and re.fullmatch(r"[\d.eE+\-)]+", pieces[0].strip())
        and all(map(_is_pair, rest[:-1] or rest))
    ):
        return pending + following
    if whole and following.lstrip().startswith("- ") and _is_pair(pieces[0]):
        return f"{pending.rstrip()} {following.lstrip()}"
    return None


def _is_pair(piece: str) -> bool:
    key, colon, value = piece.strip().strip("-").strip().rpartition(":")
    return bool(colon) and read_number(value) is not None and bool(_KEY.match(key))


def _line_end(block: bytes, position: int) -> int:
    """Return where the line at ``position`` ends: at the next newline or carriage return."""
    newline = block.find(b"\n", position)
    newline = len(block) if newline < 0 else newline
    back = block.find(b"\r", position, newline)
    return back if back >= 0 else newline
