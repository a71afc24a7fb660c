"""BM25 in this process: built by bm25s, searched through its sparse arrays, saved to a folder.

Scores are those of bm25s (Lucene's variant). The search itself touches only the passages that hold a word
of the query, and breaks ties by the passages' order, so results are the same on every machine.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from llds.errors import LLDSError
from llds.files import atomic_folder
from llds.search.passages import Passage

_ABOUT = "llds-index.json"
_PASSAGES = "passages.jsonl"
_OFFSETS = "offsets.npy"
_FORMAT = 1
_RARE = 16

_Row: TypeAlias = "Passage | Mapping[str, Any]"


class BM25Retriever:
    """BM25 over a corpus held in memory or mapped from a saved index.

    ``corpus``: passages, or rows ``{"id", "contents"}`` whose first line is the title. Words are lower-cased
    runs of two or more word characters, without English stop words, reduced by the English Snowball stemmer.
    """

    def __init__(self, corpus: Iterable[_Row], *, k1: float = 0.9, b: float = 0.4) -> None:
        if k1 < 0 or not 0 <= b <= 1:
            raise LLDSError(
                f"BM25 parameters k1={k1}, b={b} are out of range: k1 must be at least 0, b within 0 and 1."
            )
        passages = [_as_passage(row, number) for number, row in enumerate(corpus, start=1)]
        if not passages:
            raise LLDSError("The corpus is empty: give it at least one passage.")
        self._passages: Sequence[Passage] = passages
        self._index = _build(passages, k1, b)

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return up to ``topk`` passages per query, best first, ties by corpus order.

        Only passages that share a word with the query are found. An empty query, or one without a known
        word, finds nothing.
        """
        return [self._search_one(words, topk) for words in _words(queries)]

    def _search_one(self, words: list[str], topk: int) -> list[Passage]:
        import numpy as np

        scores, vocabulary = self._index.scores, self._index.vocab_dict
        numbers = [vocabulary[word] for word in words if word in vocabulary]
        spans = [slice(scores["indptr"][number], scores["indptr"][number + 1]) for number in numbers]
        if not spans or topk < 1:
            return []
        postings = np.concatenate([scores["indices"][span] for span in spans])
        weights = np.concatenate([scores["data"][span] for span in spans])
        documents, totals = _sum_by_document(postings, weights, len(self))
        if len(totals) > topk:
            kept = totals >= np.partition(totals, -topk)[-topk]
            documents, totals = documents[kept], totals[kept]
        best = np.lexsort((documents, -totals))[:topk]
        return [self._passages[int(documents[i])].with_score(float(totals[i])) for i in best]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the index and its passages to ``folder``, which appears whole or not at all.

        An older index there is replaced. Raises :class:`LLDSError` when the folder holds something else.
        """
        target = Path(folder)
        if target.exists() and not (target / _ABOUT).is_file():
            raise LLDSError(f"{target} exists and is not a search index: name a new folder, or remove it.")
        with atomic_folder(target) as draft:
            self._write(draft)

    def _write(self, folder: Path) -> None:
        import numpy as np

        self._index.save(folder, show_progress=False)
        offsets = [0]
        with (folder / _PASSAGES).open("wb") as file:
            for passage in self._passages:
                row = {"id": passage.id, "contents": passage.contents}
                offsets.append(offsets[-1] + file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n"))
        np.save(folder / _OFFSETS, np.asarray(offsets, dtype=np.int64))
        about = {"format": _FORMAT, "passages": len(self._passages), "k1": self._index.k1, "b": self._index.b}
        (folder / _ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, mmap: bool = True) -> BM25Retriever:
        """Read an index written by :meth:`save`.

        ``mmap``: leave the arrays on disk and page them in when asked. Raises :class:`LLDSError` when
        ``folder`` holds no index, one of another format, or a damaged one.
        """
        target = Path(folder)
        about = _read_about(target)
        if about.get("format") != _FORMAT:
            raise LLDSError(f"{target} is a search index of format {about.get('format')}: build it again.")
        retriever = cls.__new__(cls)
        try:
            retriever._index = _bm25s().BM25.load(target, mmap=mmap, show_progress=False)
            retriever._passages = _PassageFile(target, about["passages"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LLDSError(f"The search index {target} is damaged ({error}): build it again.") from error
        return retriever


class _PassageFile(Sequence[Passage]):
    """Passages read one by one from a JSONL file through the byte offsets of its lines."""

    def __init__(self, folder: Path, count: int) -> None:
        import numpy as np

        self._offsets = np.load(folder / _OFFSETS, mmap_mode="r")
        self._lines = np.memmap(folder / _PASSAGES, dtype=np.uint8, mode="r")
        if len(self._offsets) != count + 1 or len(self._lines) != self._offsets[-1]:
            raise ValueError(f"{_PASSAGES} and {_OFFSETS} don't belong together")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        row = json.loads(self._lines[start:end].tobytes())
        return Passage.from_contents(row["id"], row["contents"])


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise LLDSError('BM25 search needs bm25s and PyStemmer: run pip install "llds[search]".') from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG on import
    return bm25s


def _build(passages: Sequence[Passage], k1: float, b: float) -> Any:
    words = _words([passage.contents for passage in passages])
    vocabulary: dict[str, int] = {}
    numbers = [[vocabulary.setdefault(word, len(vocabulary)) for word in row] for row in words]
    if not vocabulary:
        raise LLDSError(
            "The corpus has no words to search for: its passages hold only stop words or punctuation."
        )
    index = _bm25s().BM25(k1=k1, b=b, method="lucene", backend="numpy")
    index.index((numbers, vocabulary), show_progress=False)
    return index


def _words(texts: Sequence[str]) -> list[list[str]]:
    from Stemmer import Stemmer

    stemmer = Stemmer("english")
    tokens: list[list[str]] = _bm25s().tokenize(
        list(texts), stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False
    )
    return tokens


def _sum_by_document(postings: Any, weights: Any, count: int) -> tuple[Any, Any]:
    """Return the different numbers in ``postings``, rising, and the sum of the ``weights`` of each."""
    import numpy as np

    if len(postings) * _RARE < count:  # sorting a few is cheaper than an array of the whole corpus
        documents, places = np.unique(postings, return_inverse=True)
        return documents, np.bincount(places, weights=weights)
    sums = np.bincount(postings, weights=weights)
    documents = np.flatnonzero(sums)
    return documents, sums[documents]


def _as_passage(row: _Row, number: int) -> Passage:
    if isinstance(row, Passage):
        return row
    contents = row.get("contents")
    if not isinstance(contents, str):
        raise LLDSError(
            f'Corpus row {number} has no text under "contents": write title and text there, line by line.'
        )
    return Passage.from_contents(str(row.get("id", number - 1)), contents)


def _read_about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    except OSError as error:
        raise LLDSError(
            f"{folder} holds no search index ({_ABOUT} can't be read): build one first."
        ) from error
    except ValueError as error:
        raise LLDSError(f"{folder / _ABOUT} is damaged: build the index again.") from error
    return about if isinstance(about, dict) else {}
