"""BM25 as arrays: for every word the passages that hold it and the score that it gives them.

The arrays are those of bm25s (its Lucene variant), bit for bit, but built from a stream: what has been read
is sorted chunk by chunk, kept in memory or in a file, and put in place at the end. The search adds up the
scores of the rare words first and stops looking for new passages when the common ones can't lift any into
the best; what it returns is the same as if it had added up everything.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llds.errors import LLDSError
from llds.search.words import WordNumbers

Ints: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[Any]
Allocate: TypeAlias = Callable[[str, int, str], NDArray[Any]]
"""``(name, length, dtype)`` → an array to fill."""

_CHUNK = 4_000_000  # words sorted at a time: about 200 MB
_RARE = 16


@dataclass(frozen=True)
class Postings:
    """``indptr[w]:indptr[w + 1]`` bounds the postings of word ``w``: ``indices``, passages in rising order,
    and ``data``, the score of ``w`` in each. ``peaks[w]`` is the largest of these; ``count`` the number of
    passages.
    """

    data: Floats
    indices: Ints
    indptr: Ints
    peaks: Floats
    count: int

    def best(self, words: Sequence[int], topk: int) -> tuple[Ints, Floats]:
        """Return at most ``topk`` passages that hold any of ``words`` and their scores, best first.

        A word that is given twice counts twice. Ties go by the passages' order.
        """
        spans = [self._span(word) for word in words]
        if not spans or topk < 1:
            return np.empty(0, np.int64), np.empty(0)
        order = sorted(range(len(spans)), key=lambda i: spans[i].stop - spans[i].start)
        ceilings = [float(self.peaks[words[i]]) for i in order]
        for taken in range(1, len(order) + 1):
            rest = sum(ceilings[taken:])
            longer = taken == len(order) or self._grows(spans, order, taken)
            if not longer:
                continue
            documents, totals = self._add_up([spans[i] for i in order[:taken]])
            if taken == len(order):
                break
            bar = _kth_largest(totals, topk)
            if bar > rest:
                documents, totals = self._complete(
                    documents, totals, bar, [spans[i] for i in order[taken:]], ceilings[taken:]
                )
                break
        documents, totals = _best(documents, totals, topk)
        if not np.isfinite(totals).all():
            raise damaged("it holds scores that are no numbers")
        return documents, totals

    def _span(self, word: int) -> slice:
        return slice(int(self.indptr[word]), int(self.indptr[word + 1]))

    def _grows(self, spans: Sequence[slice], order: Sequence[int], taken: int) -> bool:
        """Say whether the next word has so many postings that leaving them unread is worth a look."""
        here = sum(spans[i].stop - spans[i].start for i in order[:taken])
        following = spans[order[taken]]
        return bool(following.stop - following.start > 2 * here)

    def _add_up(self, spans: Sequence[slice]) -> tuple[Ints, Floats]:
        """Return the passages of ``spans``, rising, and the sum of the scores of each."""
        indices = np.concatenate([self.indices[span] for span in spans])
        weights = np.concatenate([self.data[span] for span in spans])
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.count:
            raise damaged(f"it names passages beyond its {self.count}")
        if len(indices) * _RARE < self.count:  # sorting a few is cheaper than an array of the whole corpus
            documents, places = np.unique(indices, return_inverse=True)
            return documents, np.bincount(places, weights=weights)
        sums = np.bincount(indices, weights=weights)
        documents = np.flatnonzero(sums)
        return documents, sums[documents]

    def _complete(
        self,
        documents: Ints,
        totals: Floats,
        bar: float,
        spans: Sequence[slice],
        ceilings: Sequence[float],
    ) -> tuple[Ints, Floats]:
        """Add the scores of the words left out, for those passages alone that may still reach ``bar``."""
        for place, span in enumerate(spans):
            promising = totals + sum(ceilings[place:]) >= bar
            documents, totals = documents[promising], totals[promising]
            indices = self.indices[span]
            at = np.searchsorted(indices, documents)
            held = at < len(indices)
            held[held] = indices[at[held]] == documents[held]
            totals[held] += self.data[span][at[held]]
        return documents, totals


def damaged(what: str) -> LLDSError:
    """Return the error for an index whose content makes no sense."""
    return LLDSError(f"The search index is damaged ({what}): copy it again, or build it anew.")


class PostingsBuilder:
    """Takes texts one by one and makes :class:`Postings` of them.

    ``spill``: a file for what has been read; without it everything stays in memory. With it the memory
    needed is that of the vocabulary, of one number per passage and of one chunk of words.
    """

    def __init__(self, k1: float, b: float, spill: Path | None = None, chunk: int = _CHUNK) -> None:
        if k1 < 0 or not 0 <= b <= 1:
            raise LLDSError(
                f"BM25 parameters k1={k1}, b={b} are out of range: k1 must be at least 0, b within 0 and 1."
            )
        self._k1, self._b, self._chunk = k1, b, chunk
        self._numbers = WordNumbers()
        self._words = array("i")
        self._lengths = array("i")
        self._first = 0  # the first passage of the chunk under way
        self._chunks = _Chunks(spill)

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, text: str) -> None:
        """Take the next passage."""
        numbers = self._numbers.numbers(text)
        self._words.extend(numbers)
        self._lengths.append(len(numbers))
        if len(self._words) >= self._chunk:
            self._close_chunk()

    def finish(self, allocate: Allocate | None = None) -> tuple[list[str], Postings]:
        """Return the words, sorted, and their postings.

        ``allocate`` gives the arrays, for instance as mapped files; they are named data, indices, indptr and
        peaks. Raises :class:`LLDSError` when no passage was given, or none with a word.
        """
        self._close_chunk()
        stems = self._numbers.stems
        if not self._lengths:
            raise LLDSError("The corpus is empty: give it at least one passage.")
        if not stems:
            raise LLDSError(
                "The corpus has no words to search for: its passages hold only stop words or punctuation."
            )
        allocate = allocate or (lambda name, length, kind: np.empty(length, kind))
        order = sorted(range(len(stems)), key=stems.__getitem__)
        rank = np.empty(len(stems), np.int64)
        rank[order] = np.arange(len(stems))
        return [stems[number] for number in order], self._place(rank, allocate)

    def _close_chunk(self) -> None:
        if len(self) == self._first:
            return
        lengths = np.frombuffer(self._lengths, np.int32)[self._first :]
        passages = np.repeat(np.arange(self._first, len(self), dtype=np.int64), lengths)
        keys = (np.frombuffer(self._words, np.int32).astype(np.int64) << 32) | passages
        keys, counts = np.unique(keys, return_counts=True)
        self._chunks.append(keys, counts.astype(np.int32))
        del lengths, passages, keys, counts  # an array that others look into can't grow
        self._words = array("i")
        self._first = len(self)

    def _place(self, rank: Ints, allocate: Allocate) -> Postings:
        frequency = np.zeros(len(rank), np.int64)
        for keys, _ in self._chunks:
            frequency += np.bincount(rank[keys >> 32], minlength=len(rank))
        indptr = allocate("indptr", len(rank) + 1, "int64")
        indptr[0] = 0
        np.cumsum(frequency, out=indptr[1:])
        total = int(indptr[-1])
        data, indices = allocate("data", total, "float32"), allocate("indices", total, "int32")
        peaks = allocate("peaks", len(rank), "float32")
        peaks[:] = 0
        lengths = np.frombuffer(self._lengths, np.int32)
        mean = lengths.mean()
        weight = inverse_frequency(frequency, len(lengths))
        free = np.array(indptr[:-1])
        for keys, counts in self._chunks:
            words, passages = rank[keys >> 32], keys & 0xFFFFFFFF
            starts = np.flatnonzero(np.diff(words, prepend=-1))
            sizes = np.diff(starts, append=len(words))
            places = free[words] + np.arange(len(words)) - np.repeat(starts, sizes)
            norm = self._k1 * ((1 - self._b) + self._b * lengths[passages] / mean)
            scores = (weight[words] * (counts / (norm + counts))).astype(np.float32)
            data[places], indices[places] = scores, passages
            free[words[starts]] += sizes
            np.maximum.at(peaks, words[starts], np.maximum.reduceat(scores, starts))
        return Postings(data, indices, indptr, peaks, len(lengths))


class _Chunks:
    """Pairs of arrays, (word << 32 | passage) and how often it occurs there; in memory or in a file."""

    def __init__(self, spill: Path | None) -> None:
        self._spill = spill
        self._kept: list[tuple[Ints, Ints]] = []
        self._sizes: list[int] = []
        if spill is not None:
            spill.write_bytes(b"")

    def append(self, keys: Ints, counts: Ints) -> None:
        if self._spill is None:
            self._kept.append((keys, counts))
            return
        with self._spill.open("ab") as file:
            keys.tofile(file)
            counts.tofile(file)
        self._sizes.append(len(keys))

    def __iter__(self) -> Iterator[tuple[Ints, Ints]]:
        yield from (pair for pair in self._kept if len(pair[0]))
        if self._spill is None:
            return
        with self._spill.open("rb") as file:
            for size in self._sizes:
                keys = np.fromfile(file, np.int64, size)
                counts = np.fromfile(file, np.int32, size)
                if size:
                    yield keys, counts


def inverse_frequency(frequency: Ints, count: int) -> Floats:
    """Return the Lucene weight of every word, as bm25s rounds it."""
    values, places = np.unique(frequency, return_inverse=True)
    logs = [math.log(1 + (count - n + 0.5) / (n + 0.5)) for n in values.tolist()]
    return np.asarray(logs, np.float32)[places]


def _kth_largest(values: Floats, k: int) -> float:
    return float(np.partition(values, -k)[-k]) if len(values) >= k else -math.inf


def _best(documents: Ints, totals: Floats, topk: int) -> tuple[Ints, Floats]:
    if len(totals) > topk:
        kept = totals >= np.partition(totals, -topk)[-topk]
        documents, totals = documents[kept], totals[kept]
    best = np.lexsort((documents, -totals))[:topk]
    return documents[best], totals[best]
