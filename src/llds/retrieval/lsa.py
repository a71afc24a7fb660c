"""A static encoder trained on the corpus itself, by latent semantic analysis: no download, no GPU.

The matrix of BM25 scores, passages by words, is factorised (Halko, Martinsson and Tropp's randomised range
finder, arXiv 0909.4061, algorithm 4.4). The direction of a word is its right singular vector, so that words
of the same passages lie near each other, and a share of a random one, so that no two words lie at the same
place and rare ones have a place at all. Its length is BM25's weight of the word.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llds.search.postings import Postings, inverse_frequency

_SAMPLE = 200_000  # passages looked at; more change little and cost memory
_WORDS = 50_000  # words that get a vector by the factorisation: the most frequent ones
_MORE = 32  # columns beyond those asked for, which make the range finder exact enough
_ROUNDS = 4
_NOTHING = 1e-4  # of the largest singular value: below lie directions made of rounding
_RANDOM = 0.5  # of the random direction; docs/retrieval.md has what it does for recall


def train_table(
    postings: Postings, dimension: int, on_round: Callable[[int], None] = lambda done: None
) -> NDArray[np.float32]:
    """Return one vector per word, ``[words, dimension]``.

    The same postings give the same table, up to rounding. ``on_round`` is told the rounds done, of
    :func:`rounds`.
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch calls its sparse CSR beta
        words, directions = _directions(postings, dimension, on_round)
    count = len(postings.peaks)
    table = _RANDOM * _unit(np.random.default_rng(0).standard_normal((count, dimension), np.float32))
    table[words, : directions.shape[1]] += directions
    weights = inverse_frequency(np.diff(postings.indptr), postings.count)
    on_round(rounds())
    return np.asarray(table * weights[:, None], np.float32)


def _directions(
    postings: Postings, dimension: int, on_round: Callable[[int], None]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return words and the directions of each, ``[words, at most dimension]``, of length 1."""
    words, matrix = _matrix(postings)
    width = min(dimension + _MORE, *matrix.shape)
    generator = torch.Generator().manual_seed(0)
    transposed = matrix.t().to_sparse_csr()
    basis = torch.randn(matrix.shape[1], width, generator=generator)
    for done in range(_ROUNDS):
        left = torch.linalg.qr(matrix @ basis).Q
        basis = torch.linalg.qr(transposed @ left).Q
        on_round(done + 1)
    _, values, rotation = torch.linalg.svd(matrix @ basis, full_matrices=False)
    rank = min(dimension, int((values > _NOTHING * values[0]).sum()))
    return words, _unit(_turned(basis @ rotation[:rank].T, generator).numpy())


def _turned(columns: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the orthonormal ``columns`` turned as near to random ones as they go (orthogonal Procrustes).

    The result depends on their span alone. The signs of singular vectors, and their directions where singular
    values are equal, are left to rounding; what a word has in common with random directions would be too.
    """
    random = torch.randn(columns.shape, generator=generator)
    left, _, right = torch.linalg.svd(columns.T @ random)
    turn: torch.Tensor = left @ right
    return columns @ turn


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1), np.float32)


def rounds() -> int:
    """Return how many rounds the training has, for a progress bar."""
    return _ROUNDS + 1


def _matrix(postings: Postings) -> tuple[NDArray[np.int64], Any]:
    """Return the words taken and the sparse matrix ``[sampled passages, words taken]``, rows of length 1."""
    frequency = np.diff(postings.indptr)
    common = np.argsort(-frequency, kind="stable")[:_WORDS]
    words = np.sort(common[frequency[common] >= min(2, frequency.max())])
    step = -(-postings.count // _SAMPLE)
    rows, columns, values = [], [], []
    for column, word in enumerate(words):
        span = slice(int(postings.indptr[word]), int(postings.indptr[word + 1]))
        indices = np.asarray(postings.indices[span])
        kept = indices % step == 0
        rows.append(indices[kept] // step)
        columns.append(np.full(int(kept.sum()), column))
        values.append(np.asarray(postings.data[span])[kept])
    row, place, value = map(np.concatenate, (rows, columns, values))
    height = -(-postings.count // step)
    lengths = np.sqrt(np.bincount(row, weights=value**2, minlength=height))
    scaled = torch.from_numpy((value / np.where(lengths > 0, lengths, 1)[row]).astype(np.float32))
    places = torch.from_numpy(np.stack([row, place]).astype(np.int64))
    matrix = torch.sparse_coo_tensor(places, scaled, (height, len(words))).coalesce().to_sparse_csr()
    return words, matrix
