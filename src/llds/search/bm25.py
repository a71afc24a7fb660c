"""BM25 in this process: built from passages in memory, or mapped from an index folder.

Scores are those of bm25s (Lucene's variant), whose own loader reads the folder too. Ties are broken by the
passages' order, so results are the same on every machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from llds.errors import LLDSError
from llds.files import atomic_folder
from llds.search.indexfiles import (
    PassageFile,
    PassageWriter,
    WordFile,
    is_index,
    load_array,
    new_array,
    read_about,
    write_about,
    write_words,
)
from llds.search.passages import Passage
from llds.search.postings import Floats, Ints, Postings, PostingsBuilder
from llds.search.words import stems_of

_Row: TypeAlias = "Passage | Mapping[str, Any]"
_ARRAYS = {"data": "data.csc.index", "indices": "indices.csc.index", "indptr": "indptr.csc.index"}


class _Vocabulary(Protocol):
    def get(self, word: str, /) -> int | None: ...


class BM25Retriever:
    """BM25 over a corpus held in memory or mapped from a saved index.

    ``corpus``: passages, or rows ``{"id", "contents"}`` whose first line is the title. Words are lower-cased
    runs of two or more word characters, without English stop words, reduced by the English Snowball stemmer.
    """

    def __init__(self, corpus: Iterable[_Row], *, k1: float = 0.9, b: float = 0.4) -> None:
        builder = PostingsBuilder(k1, b)
        passages = [_as_passage(row, number) for number, row in enumerate(corpus, start=1)]
        for passage in passages:
            builder.add(passage.contents)
        words, self.postings = builder.finish()
        self.passages: Sequence[Passage] = passages
        self._vocabulary: _Vocabulary = {word: number for number, word in enumerate(words)}
        self._words: Iterable[str] = words
        self._k1, self._b = k1, b

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return up to ``topk`` passages per query, best first, ties by corpus order.

        Only passages that share a word with the query are found. An empty query, or one without a known
        word, finds nothing.
        """
        return [
            [self.passages[int(n)].with_score(float(score)) for n, score in zip(*ranking, strict=True)]
            for ranking in self.rank(queries, topk)
        ]

    def rank(self, queries: Sequence[str], topk: int) -> list[tuple[Ints, Floats]]:
        """Return for every query the numbers and the scores of its passages, as :meth:`search` does."""
        return [self.postings.best(self._numbers(query), topk) for query in queries]

    def _numbers(self, query: str) -> list[int]:
        numbers = map(self._vocabulary.get, stems_of(query))
        return [number for number in numbers if number is not None]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the index and its passages to ``folder``, which appears whole or not at all.

        An older index there is replaced. Raises :class:`LLDSError` when the folder holds something else.
        """
        target = Path(folder)
        check_target(target)
        with atomic_folder(target) as draft:
            writer = PassageWriter(draft)
            for passage in self.passages:
                writer.add(passage)
            writer.close()
            for name in ("data", "indices", "indptr", "peaks"):
                np.save(draft / f"{_ARRAYS.get(name, name)}.npy", getattr(self.postings, name))
            write_bm25(draft, list(self._words), len(self), self._k1, self._b)
            write_about(draft, {"passages": len(self), "bm25": {"k1": self._k1, "b": self._b}})

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, mmap: bool = True) -> BM25Retriever:
        """Read an index written by :meth:`save` or ``llds index``.

        ``mmap``: leave the arrays on disk and page them in when asked. Raises :class:`LLDSError` when
        ``folder`` holds no index, one of another format, or a damaged one.
        """
        target = Path(folder)
        about = read_about(target)
        retriever = cls.__new__(cls)
        try:
            retriever.passages = PassageFile(target, about["passages"])
            words = WordFile(target)
            retriever._words, retriever._vocabulary = words, words
            retriever.postings = load_postings(target, len(words), about["passages"], mmap)
            retriever._k1, retriever._b = float(about["bm25"]["k1"]), float(about["bm25"]["b"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LLDSError(f"The search index {target} is damaged ({error}): build it again.") from error
        return retriever


def check_target(target: Path) -> None:
    """Raise :class:`LLDSError` when ``target`` exists and is no index that could be replaced."""
    if target.exists() and not is_index(target):
        raise LLDSError(f"{target} exists and is not a search index: name a new folder, or remove it.")


def new_postings_array(folder: Path, name: str, length: int, kind: str) -> Any:
    """Make the array ``name`` of the postings as a mapped file in ``folder``."""
    return new_array(folder, _ARRAYS.get(name, name), length, kind)


def write_bm25(folder: Path, words: Sequence[str], count: int, k1: float, b: float) -> None:
    """Write the words, for us and for bm25s, and the parameters that bm25s wants beside the arrays."""
    write_words(folder, words)
    numbers = {word: number for number, word in enumerate(words)}
    (folder / "vocab.index.json").write_text(json.dumps(numbers, ensure_ascii=False), encoding="utf-8")
    parameters = {
        "k1": k1,
        "b": b,
        "delta": 0.5,
        "method": "lucene",
        "idf_method": "lucene",
        "dtype": "float32",
        "int_dtype": "int32",
        "num_docs": count,
        "version": metadata.version("bm25s"),
        "backend": "numpy",
    }
    (folder / "params.index.json").write_text(json.dumps(parameters) + "\n", encoding="utf-8")


def load_postings(folder: Path, words: int, count: int, mmap: bool = True) -> Postings:
    """Read the postings in ``folder``; raises ``OSError`` or ``ValueError`` when they are damaged."""
    indptr = load_array(folder, _ARRAYS["indptr"], "int64", words + 1)
    if indptr[0] != 0 or np.any(np.diff(indptr) < 0):
        raise ValueError("indptr.csc.index.npy does not rise from 0")
    data = load_array(folder, _ARRAYS["data"], "float32", int(indptr[-1]))
    indices = load_array(folder, _ARRAYS["indices"], "int32", int(indptr[-1]))
    peaks = load_array(folder, "peaks", "float32", words)
    if mmap:
        return Postings(data, indices, indptr, peaks, count)
    return Postings(np.array(data), np.array(indices), np.array(indptr), np.array(peaks), count)


def _as_passage(row: _Row, number: int) -> Passage:
    if isinstance(row, Passage):
        return row
    contents = row.get("contents")
    if not isinstance(contents, str):
        raise LLDSError(
            f'Corpus row {number} has no text under "contents": write title and text there, line by line.'
        )
    return Passage.from_contents(str(row.get("id", number - 1)), contents)
