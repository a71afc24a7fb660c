"""From an index folder to a retriever."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from llds.errors import LLDSError
from llds.retrieval.dense import open_dense
from llds.retrieval.encoders import load_encoder
from llds.retrieval.rankers import HybridRanker, IndexRetriever, Ranker, Scorer
from llds.search.bm25 import BM25Retriever
from llds.search.indexfiles import read_about

Mode: TypeAlias = Literal["auto", "bm25", "dense", "hybrid"]
_DENSE = "dense"


@dataclass(frozen=True)
class IndexInfo:
    """What an index folder holds. ``encoder`` and ``vectors`` are None without vectors."""

    passages: int
    encoder: str | None
    vectors: str | None


def read_info(folder: str | os.PathLike[str]) -> IndexInfo:
    """Say what ``folder`` holds; raises :class:`LLDSError` when it is no index, or damaged."""
    about = read_about(Path(folder))
    dense = about.get(_DENSE) or {}
    return IndexInfo(about["passages"], dense.get("encoder"), dense.get("vectors"))


def open_index(
    folder: str | os.PathLike[str], mode: Mode = "auto", reranker: Scorer | None = None
) -> IndexRetriever:
    """Return the retriever over the index in ``folder``.

    ``mode``: ``bm25``; ``dense``, by vectors; ``hybrid``, both by reciprocal rank fusion; ``auto`` takes
    hybrid where there are vectors, else bm25. Raises :class:`LLDSError` when ``folder`` is no index, is
    damaged, or has no vectors though ``mode`` asks for them.
    """
    root = Path(folder)
    if mode not in get_args(Mode):
        raise LLDSError(f"There is no search mode {mode!r}: choose {', '.join(get_args(Mode))}.")
    info = read_info(root)
    if mode in ("dense", "hybrid") and info.encoder is None:
        raise LLDSError(
            f"The index {root} has no vectors, so it can't be searched in mode {mode}: "
            "build it again with --encoder, or use mode bm25."
        )
    bm25 = BM25Retriever.load(root)
    ranker: Ranker = bm25
    if info.encoder is not None and mode != "bm25":
        dense = _open_dense(root, info)
        ranker = dense if mode == "dense" else HybridRanker([bm25, dense])
    return IndexRetriever(bm25.passages, ranker, reranker)


def _open_dense(root: Path, info: IndexInfo) -> Ranker:
    kind: Any = info.vectors
    if kind not in ("flat", "ivf", "hnsw"):
        raise LLDSError(f"The index {root} has vectors of unknown kind {kind!r}: build it again.")
    encoder = load_encoder(root / _DENSE)
    try:
        return open_dense(root / _DENSE, kind, info.passages, encoder)
    except (OSError, ValueError) as error:
        if isinstance(error, LLDSError):
            raise
        raise LLDSError(f"The search index {root} is damaged ({error}): build it again.") from error
