"""Nearest passages by the inner product of vectors, with faiss: exactly (flat), or faster and nearly (ivf, hnsw).

The vectors of a flat index are a plain mapped array; ivf and hnsw are faiss's own files, mapped too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llds.errors import LLDSError
from llds.retrieval.encoders import Encoder, Vectors
from llds.retrieval.rankers import Ranking
from llds.search.indexfiles import map_array

Kind: TypeAlias = Literal["flat", "ivf", "hnsw"]

VECTORS = "vectors.npy"
_FAISS = "vectors.faiss"
_BATCH = 65_536  # vectors given to faiss at a time
_NEIGHBOURS = 32  # links per vector of hnsw
_BUILD_WIDTH = 80  # candidates looked at when linking
_SEARCH_WIDTH = 256  # candidates looked at when searching; never fewer than are asked for
_PER_LIST = 64  # vectors per list of ivf that its training looks at
_PROBED = 16  # one list in so many is searched


class DenseRanker:
    """Ranks passages by the nearness of their vectors to that of the query."""

    def __init__(self, encoder: Encoder, find: Callable[[Vectors, int], tuple[Any, Any]]) -> None:
        self._encoder = encoder
        self._find = find

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """Return the nearest passages; none for a query whose vector is zero. Ties go by their order."""
        vectors = self._encoder.encode_queries(queries)
        if not len(vectors) or topk < 1:
            return [(np.empty(0, np.int64), np.empty(0)) for _ in queries]
        scores, numbers = self._find(vectors, topk)
        asked = np.any(vectors != 0, axis=1)
        return [_ranking(numbers[i], scores[i], bool(asked[i])) for i in range(len(queries))]


def open_dense(folder: Path, kind: Kind, count: int, encoder: Encoder) -> DenseRanker:
    """Return the ranker over the vectors in ``folder``.

    Raises :class:`LLDSError` when faiss is missing, ``ValueError`` when the vectors don't fit.
    """
    faiss = load_faiss()
    if kind == "flat":
        vectors = map_array(folder / VECTORS)
        _check_shape(vectors.shape, vectors.dtype == np.float32, count, encoder)
        metric = faiss.METRIC_INNER_PRODUCT
        return DenseRanker(encoder, lambda asked, k: faiss.knn(asked, vectors, min(k, count), metric=metric))
    try:
        index = faiss.read_index(str(folder / _FAISS), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise ValueError(f"faiss can't read {_FAISS}: {str(error).splitlines()[0]}") from error
    _check_shape((index.ntotal, index.d), True, count, encoder)
    if kind == "ivf":
        index.nprobe = max(1, index.nlist // _PROBED)
    else:
        index.hnsw.efSearch = _SEARCH_WIDTH
    return DenseRanker(encoder, lambda asked, k: index.search(asked, min(k, count)))


def build_faiss(folder: Path, kind: Kind, on_progress: Callable[[int], None] = lambda done: None) -> None:
    """Turn the vectors in ``folder`` into the index of ``kind`` and remove them; nothing to do for flat.

    The same vectors give the same index. faiss holds it in memory while it is built. ``on_progress`` is told
    the vectors done.
    """
    if kind == "flat":
        return
    faiss = load_faiss()
    vectors: NDArray[np.float32] = map_array(folder / VECTORS)
    count, dimension = vectors.shape
    if kind == "ivf":
        lists = max(1, min(int(4 * math.sqrt(count)), count // 39))
        quantizer = faiss.IndexFlatIP(dimension)
        index = faiss.IndexIVFFlat(quantizer, dimension, lists, faiss.METRIC_INNER_PRODUCT)
        index.train(np.ascontiguousarray(vectors[:: max(1, count // (lists * _PER_LIST))]))
    else:
        index = faiss.IndexHNSWFlat(dimension, _NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _BUILD_WIDTH
    for first in range(0, count, _BATCH):
        index.add(np.ascontiguousarray(vectors[first : first + _BATCH]))
        on_progress(min(first + _BATCH, count))
    faiss.write_index(index, str(folder / _FAISS))
    (folder / VECTORS).unlink()


def load_faiss() -> Any:
    """Return the package; raises :class:`LLDSError` when it is missing."""
    try:
        import faiss
    except ImportError as error:
        raise LLDSError('Dense search needs faiss: run pip install "llds[dense]".') from error
    return faiss


def _check_shape(shape: tuple[int, ...], is_float: bool, count: int, encoder: Encoder) -> None:
    if not is_float or shape != (count, encoder.dimension):
        raise ValueError(
            f"the vectors have shape {shape}, but there are {count} passages and the encoder gives "
            f"{encoder.dimension} numbers"
        )


def _ranking(numbers: NDArray[np.int64], scores: NDArray[np.float32], asked: bool) -> Ranking:
    found = (numbers >= 0) & asked & np.isfinite(scores)
    numbers, scores = numbers[found], scores[found]
    order = np.lexsort((numbers, -scores))
    return numbers[order], scores[order].astype(np.float64)
