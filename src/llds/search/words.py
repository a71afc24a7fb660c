"""Words of a text as BM25 counts them: those of bm25s with English stop words and the Snowball stemmer."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from llds.errors import LLDSError

_WORD = re.compile(r"(?u)\b\w\w+\b")
_STOP_WORD = -1


class WordNumbers:
    """Gives every stem a number, by first appearance, and texts as rows of them."""

    def __init__(self) -> None:
        self._raw = _Raw()

    @property
    def stems(self) -> list[str]:
        """All stems so far; the place of each is its number."""
        return list(self._raw.stems)

    def numbers(self, text: str) -> list[int]:
        """Return the numbers of the words of ``text`` in order, without stop words."""
        found = map(self._raw.__getitem__, _WORD.findall(text.lower()))
        return [number for number in found if number != _STOP_WORD]


def stems_of(text: str) -> list[str]:
    """Return the stems of ``text`` in order, without stop words."""
    stop, stem = _stop_words(), stemmer().stemWord
    return [stem(word) for word in _WORD.findall(text.lower()) if word not in stop]


class _Raw(dict[str, int]):
    """From words as they are written to the numbers of their stems, so that each is stemmed once."""

    def __init__(self) -> None:
        super().__init__()
        self.stems: dict[str, int] = {}
        self._stop = _stop_words()
        self._stem = stemmer().stemWord

    def __missing__(self, word: str) -> int:
        number = _STOP_WORD
        if word not in self._stop:
            number = self.stems.setdefault(self._stem(word), len(self.stems))
        self[word] = number
        return number


def stemmer() -> Any:
    """Return an English Snowball stemmer; raises :class:`LLDSError` when PyStemmer is missing."""
    try:
        from Stemmer import Stemmer
    except ImportError as error:
        raise missing_search() from error
    return Stemmer("english")


@functools.cache
def _stop_words() -> frozenset[str]:
    try:
        from bm25s.stopwords import STOPWORDS_EN
    except ImportError as error:
        raise missing_search() from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG on import
    return frozenset(STOPWORDS_EN)


def missing_search() -> LLDSError:
    """Return the error for an installation without the extra ``search``."""
    return LLDSError('BM25 search needs bm25s and PyStemmer: run pip install "llds[search]".')
