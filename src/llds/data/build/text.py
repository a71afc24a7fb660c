"""Cleaning of marked-up text and its packing into short passages."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence

PASSAGE_WORDS = 40
"""No passage outside Wikipedia is longer, so that a small model is shown whole passages."""


def clean(text: str) -> str:
    """Return ``text`` without tags and entities, with single spaces and plain quotes."""
    text = re.sub(r"<\s*(br|/?p|/?li|/?ul)\b[^>]*>", " ", text, flags=re.IGNORECASE)
    text = re.sub(r"</?[a-zA-Z][^>]*>", "", text)
    text = html.unescape(html.unescape(text)).replace("\u00ad", "").replace("\u200b", "")
    text = text.translate({0x201C: '"', 0x201D: '"', 0x2018: "'", 0x2019: "'"})
    text = re.sub(r"\s+", " ", text)
    return re.sub(r" +([,;.)])", r"\1", text).strip(" ;")


def split_notes(text: str) -> tuple[str, list[str]]:
    """Split cleaned ``text`` into what stands before its notes and the notes, each without its label."""
    head, *notes = re.split(r"[;,.]?\s*\bnotes?(?: \d+)?\s*(?::|-{1,2}|–)\s+", text)
    return head.strip(), [note.strip() for note in notes if note.strip()]


def pack(pieces: Iterable[str], limit: int = PASSAGE_WORDS) -> list[str]:
    """Join ``pieces`` in order into texts of at most ``limit`` words, breaking a longer piece at its punctuation."""
    texts: list[str] = []
    words: list[str] = []
    for piece in (part for whole in pieces for part in _fit(_ended(whole).split(), limit)):
        if words and len(words) + len(piece) > limit:
            texts.append(" ".join(words))
            words = []
        words.extend(piece)
    return [*texts, " ".join(words)] if words else texts


def chunks(words: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Cut ``words`` into runs of ``size``; the last may be shorter."""
    return (words[start : start + size] for start in range(0, len(words), size))


def _fit(words: list[str], limit: int) -> Iterator[list[str]]:
    while len(words) > limit:
        cut = _last_break(words[:limit])
        yield words[:cut]
        words = words[cut:]
    if words:
        yield words


def _last_break(words: list[str]) -> int:
    """Return where to cut: after the last sentence, clause or item in the second half, else at the end."""
    half = len(words) // 2
    for ending in (".!?", ";:", ","):
        for index in range(len(words), half, -1):
            if words[index - 1].rstrip("\")'").endswith(tuple(ending)):
                return index
    return len(words)


def _ended(piece: str) -> str:
    return piece if piece.endswith((".", "!", "?", '."', '!"', '?"')) else piece + "."
