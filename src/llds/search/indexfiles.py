"""The files of an index folder that every retriever shares: what it is, its passages, its words.

``llds-index.json`` says what the folder holds and how many bytes each file has, so that a copy that broke
off is noticed at once. Everything large is mapped, not read: an index opens in an instant, takes little
memory, and several processes share one copy of it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llds.errors import LLDSError
from llds.files import atomic_write_text
from llds.search.passages import Passage

ABOUT = "llds-index.json"
FORMAT = 2
_PASSAGES = "passages.jsonl"
_OFFSETS = "offsets.npy"
_WORDS = "words.bin"
_WORD_ENDS = "words.npy"
_KEPT = 1 << 17  # words whose number is kept in memory


def is_index(folder: Path) -> bool:
    """Say whether ``folder`` is, or once was, an index."""
    return (folder / ABOUT).is_file()


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Write what the folder holds, with the sizes of all files in it. Call it last."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ABOUT)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    content = {"format": FORMAT, **about, "files": sizes}
    atomic_write_text(folder / ABOUT, json.dumps(content, indent=1) + "\n")


def read_about(folder: Path) -> dict[str, Any]:
    """Return what :func:`write_about` wrote.

    Raises :class:`LLDSError` when ``folder`` holds no index, one of another format, or a file is missing or
    of another size.
    """
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except OSError as error:
        raise LLDSError(
            f"{folder} holds no search index ({ABOUT} can't be read): build one first, with llds index."
        ) from error
    except (ValueError, RecursionError) as error:
        raise LLDSError(f"{folder / ABOUT} is damaged: build the index again.") from error
    version = about.get("format") if isinstance(about, dict) else None
    if version != FORMAT:
        raise LLDSError(f"{folder} is a search index of format {version}: build it again.")
    _check_files(folder, about)
    return about  # type: ignore[no-any-return]


def _check_files(folder: Path, about: Mapping[str, Any]) -> None:
    files, count = about.get("files"), about.get("passages")
    if not isinstance(files, dict) or not isinstance(count, int) or count < 1:
        raise LLDSError(f"{folder / ABOUT} is damaged: build the index again.")
    for name, size in files.items():
        path = folder / name
        there = path.stat().st_size if path.is_file() else None
        if there != size:
            told = "is missing" if there is None else f"has {there} bytes instead of {size}"
            raise LLDSError(f"The search index {folder} is damaged ({name} {told}): copy or build it again.")


def load_array(folder: Path, name: str, kind: str, length: int | None = None) -> NDArray[Any]:
    """Map a one-dimensional array; raises ``ValueError`` when it has another type or length."""
    values = map_array(folder / f"{name}.npy")
    if values.ndim != 1 or values.dtype != np.dtype(kind) or length not in (None, len(values)):
        raise ValueError(f"{name}.npy holds {values.dtype} {values.shape}")
    return values


def map_array(path: Path) -> NDArray[Any]:
    """Map the array in ``path``; raises ``OSError`` or ``ValueError`` when it is missing or damaged."""
    try:
        values: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy reads the header with Python's own parser, which raises all sorts
        raise ValueError(f"{path.name} can't be read: {error}") from error
    return values


def new_array(folder: Path, name: str, length: int, kind: str) -> NDArray[Any]:
    """Make a mapped one-dimensional array to write to. An empty one can't be mapped, so it is just saved."""
    path = folder / f"{name}.npy"
    if length == 0:
        np.save(path, np.empty(0, kind))
        return np.empty(0, kind)
    return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=(length,))


class PassageWriter:
    """Writes passages to an index folder one by one, and where each begins."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / _PASSAGES).open("wb")
        self._ends: list[NDArray[np.int64]] = []
        self._new: list[int] = [0]
        self._end = 0

    def add(self, passage: Passage) -> None:
        """Write the next passage."""
        row = {"id": passage.id, "contents": passage.contents}
        self._end += self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._new.append(self._end)
        if len(self._new) >= 1 << 16:
            self._ends.append(np.asarray(self._new, np.int64))
            self._new = []

    def close(self) -> None:
        """Finish the files."""
        self._file.close()
        np.save(
            self._folder / _OFFSETS, np.concatenate([*self._ends, np.asarray(self._new, np.int64)]).ravel()
        )


class PassageFile(Sequence[Passage]):
    """Passages read one by one from a mapped JSONL file through the byte offsets of its lines."""

    def __init__(self, folder: Path, count: int) -> None:
        self._path = folder / _PASSAGES
        self._offsets = load_array(folder, "offsets", "int64", count + 1)
        self._lines = _mapped(self._path)
        if len(self._lines) != self._offsets[-1]:
            raise ValueError(f"{_PASSAGES} and {_OFFSETS} don't belong together")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        try:
            row = json.loads(self._lines[start:end])
            return Passage.from_contents(str(row["id"]), row["contents"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LLDSError(
                f"{self._path} is damaged at passage {index + 1}: copy the index again, or build it anew."
            ) from error


class WordFile:
    """Sorted words in a mapped file; the number of a word is its place."""

    def __init__(self, folder: Path) -> None:
        self._ends = load_array(folder, "words", "int64")
        self._words = _mapped(folder / _WORDS)
        if not len(self._ends) or self._ends[-1] != len(self._words):
            raise ValueError(f"{_WORDS} and {_WORD_ENDS} don't belong together")
        self._known: dict[str, int | None] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, word: str) -> int | None:
        """Return the number of ``word``, or None when the corpus doesn't have it."""
        known = self._known  # another thread may put a new one in its place
        if word not in known:
            if len(known) >= _KEPT:
                known = self._known = {}
            known[word] = self._look_up(word)
        return known[word]

    def _look_up(self, word: str) -> int | None:
        wanted = word.encode("utf-8", "surrogatepass")
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._at(middle) < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self._at(low) == wanted else None

    def __iter__(self) -> Iterator[str]:
        return (self._at(place).decode("utf-8", "replace") for place in range(len(self)))

    def _at(self, place: int) -> bytes:
        start = int(self._ends[place - 1]) if place else 0
        return self._words[start : int(self._ends[place])]


def write_words(folder: Path, words: Iterable[str]) -> None:
    """Write sorted words for :class:`WordFile`."""
    raw = [word.encode("utf-8", "surrogatepass") for word in words]
    (folder / _WORDS).write_bytes(b"".join(raw))
    np.save(folder / _WORD_ENDS, np.cumsum([len(word) for word in raw], dtype=np.int64))


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
