"""BM25 over the passages, as the search room is set by default: for checks and figures, not for training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

K1, B = 0.9, 0.4
"""Pyserini's defaults for passages of Wikipedia."""


class Index:
    """A BM25 index in memory (English stemmer and stop words). Needs the extra ``llds[search]``."""

    def __init__(self, contents: Sequence[str]) -> None:
        import bm25s
        import Stemmer

        logging.getLogger("bm25s").setLevel(logging.WARNING)
        self._tokenize = bm25s.tokenize
        self._stemmer = Stemmer.Stemmer("english")
        self._bm25 = bm25s.BM25(k1=K1, b=B)
        self._bm25.index(self._tokens(contents), show_progress=False)
        self._cache: dict[tuple[str, int], list[int]] = {}

    def top(self, query: str, k: int = 3) -> list[int]:
        """Return the places in ``contents`` of the ``k`` best passages, the best first; fewer if fewer match."""
        self.prepare([query], k)
        return self._cache[query, k]

    def prepare(self, queries: Iterable[str], k: int = 3) -> None:
        """Search for ``queries`` in one batch and keep the results for :meth:`top`."""
        fresh = sorted({query for query in queries if (query, k) not in self._cache})
        if fresh:
            found, scores = self._bm25.retrieve(self._tokens(fresh), k=k, show_progress=False)
            for query, places, weights in zip(fresh, found.tolist(), scores.tolist(), strict=True):
                hits = [place for place, weight in zip(places, weights, strict=True) if weight > 0]
                self._cache[query, k] = hits

    def _tokens(self, texts: Sequence[str]) -> object:
        return self._tokenize(texts, stopwords="en", stemmer=self._stemmer, show_progress=False)
