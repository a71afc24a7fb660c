"""A trajectory as it is written, coloured by span: thinking, searches, what was found, the answer."""

from __future__ import annotations

import re

STYLES = {"think": "dim", "search": "cyan", "information": "green", "answer": "bold magenta", "": ""}
_TAG = re.compile(r"</?(think|search|information|answer)>")
_LONGEST_TAG = len("</information>")


class Painter:
    """Cuts a stream of text into pieces of one style each; tags belong to the span that they bound."""

    def __init__(self) -> None:
        self._span = ""
        self._held = ""

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Take the next text; return (text, style) pieces. What may begin a tag is held back."""
        text = self._held + text
        pieces: list[tuple[str, str]] = []
        place = 0
        for tag in _TAG.finditer(text):
            closing = tag.group().startswith("</")
            if not closing:
                pieces.append((text[place : tag.start()], STYLES[self._span]))
                place, self._span = tag.start(), tag.group(1)
            pieces.append((text[place : tag.end()], STYLES[self._span]))
            place, self._span = tag.end(), "" if closing else self._span
        rest = text[place:]
        self._held = _beginning_of_tag(rest)
        pieces.append((rest[: len(rest) - len(self._held)], STYLES[self._span]))
        return [piece for piece in pieces if piece[0]]

    def flush(self) -> list[tuple[str, str]]:
        """Return what was held back."""
        held, self._held = self._held, ""
        return [(held, STYLES[self._span])] if held else []


def _beginning_of_tag(text: str) -> str:
    """Return the end of ``text`` that further text may complete to a tag."""
    start = text.rfind("<", -_LONGEST_TAG)
    return text[start:] if start >= 0 and ">" not in text[start:] else ""
