"""Rankers give the numbers of passages; an index is a ranker with the passages themselves.

``search(queries, k)`` is always the beginning of ``search(queries, k + n)``: how deep a ranker looks does not
depend on how much is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from llds.search.passages import Passage
from llds.search.postings import Floats, Ints

Ranking: TypeAlias = tuple[Ints, Floats]
"""Numbers of passages and their scores, best first."""

_NOTHING: Ranking = (np.empty(0, np.int64), np.empty(0))


class Ranker(Protocol):
    """Anything that ranks the passages of one corpus."""

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """Return for every query at most ``topk`` passages, best first."""
        ...


class Scorer(Protocol):
    """Anything that says how well a passage answers a query, given both."""

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        """Return one number per pair of query and text; more is better."""
        ...


class HybridRanker:
    """Reciprocal rank fusion (Cormack, Clarke and Büttcher 2009): a passage's score is the sum of
    ``1 / (constant + rank)`` over the rankers that found it among their best ``depth``.
    """

    def __init__(self, rankers: Sequence[Ranker], depth: int = 100, constant: float = 60.0) -> None:
        self._rankers = rankers
        self._depth = depth
        self._constant = constant

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """Return the fused rankings; ties go by the passages' order."""
        columns = [ranker.rank(queries, self._depth) for ranker in self._rankers]
        return [self._fuse(rankings, topk) for rankings in zip(*columns, strict=True)]

    def _fuse(self, rankings: Sequence[Ranking], topk: int) -> Ranking:
        numbers = np.concatenate([found for found, _ in rankings])
        if not len(numbers):
            return _NOTHING
        shares = np.concatenate(
            [1 / (self._constant + np.arange(1, len(found) + 1)) for found, _ in rankings]
        )
        passages, places = np.unique(numbers, return_inverse=True)
        scores = np.bincount(places, weights=shares)
        best = np.lexsort((passages, -scores))[:topk]
        return passages[best], scores[best]


class IndexRetriever:
    """A retriever made of a ranker and the passages. ``reranker`` orders the best ``depth`` anew."""

    def __init__(
        self,
        passages: Sequence[Passage],
        ranker: Ranker,
        reranker: Scorer | None = None,
        depth: int = 20,
    ) -> None:
        self._passages = passages
        self._ranker = ranker
        self._reranker = reranker
        self._depth = depth

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return at most ``topk`` passages per query, best first; with a reranker at most its ``depth``."""
        rankings = self._ranker.rank(queries, topk if self._reranker is None else self._depth)
        found = [
            [self._passages[int(n)].with_score(float(score)) for n, score in zip(*ranking, strict=True)]
            for ranking in rankings
        ]
        if self._reranker is not None:
            found = _reranked(self._reranker, queries, found)
        return [passages[:topk] for passages in found]


def _reranked(
    reranker: Scorer, queries: Sequence[str], found: Sequence[Sequence[Passage]]
) -> list[list[Passage]]:
    pairs = [(query, p.contents) for query, passages in zip(queries, found, strict=True) for p in passages]
    scores = iter(reranker.scores(pairs) if pairs else [])
    scored = [[passage.with_score(float(next(scores))) for passage in passages] for passages in found]
    return [sorted(passages, key=lambda passage: -passage.score) for passages in scored]
