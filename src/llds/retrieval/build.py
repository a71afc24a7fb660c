"""From a corpus file to an index folder.

The corpus is streamed, so its size is bounded by the disk, not by memory. Everything is written to a draft
beside the folder, which then appears whole or not at all. A build that was stopped, even by ``kill -9``, goes
on when the same command is run again: with the vectors where it was, with BM25 from the beginning.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llds.data.corpus import corpus_file, iter_located
from llds.data.jsonl import count_lines
from llds.errors import LLDSError
from llds.files import atomic_write_text, held, replace_folder
from llds.retrieval.dense import VECTORS, Kind, build_faiss, load_faiss
from llds.retrieval.encoders import LSA, Encoder, make_encoder, word_encoder
from llds.retrieval.lsa import rounds, train_table
from llds.search.bm25 import check_target, load_postings, new_postings_array, write_bm25
from llds.search.indexfiles import FORMAT, PassageFile, PassageWriter, WordFile, write_about
from llds.search.passages import Passage
from llds.search.postings import PostingsBuilder

DENSE = "dense"
_STATE = "build.json"
_SPILL = "spill.tmp"
_LOCK = ".lock"
_TELL = 1000  # passages between two words on progress
_SAVE = 50  # batches of vectors between two saved states


class Phases(Protocol):
    """Tells a person how far a long piece of work is."""

    def phase(self, title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Announce ``total`` units of work; the context gives a function to be told how many are done."""
        ...


class Silent:
    """Tells nothing."""

    @contextlib.contextmanager
    def phase(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """See :class:`Phases`."""
        yield lambda done: None


@dataclass(frozen=True)
class IndexOptions:
    """What to build. ``k1``, ``b``: of BM25. ``encoder``: also vectors, by this encoder (see
    :func:`llds.retrieval.encoders.make_encoder`; ``lsa`` trains one on the corpus). ``vectors``: how faiss
    keeps them. ``dimension``: of lsa. ``batch``: passages encoded at a time. The prefixes are put before
    queries and passages; None means those of E5 for E5 and none for others.
    """

    k1: float = 0.9
    b: float = 0.4
    encoder: str | None = None
    vectors: Kind = "flat"
    dimension: int = 256
    batch: int = 256
    query_prefix: str | None = None
    passage_prefix: str | None = None


def build_index(
    corpus: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    options: IndexOptions | None = None,
    display: Phases | None = None,
) -> int:
    """Index the file ``corpus`` into ``folder`` and return the number of passages.

    An older index there is replaced. Raises :class:`LLDSError` for a row that is malformed or whose id
    occurred before, by file and line, for a folder that holds something else, for a missing package, and
    when another process builds the same index.
    """
    options, display = options or IndexOptions(), display or Silent()
    _check_options(options)
    source, target = corpus_file(corpus), Path(folder)
    check_target(target)
    if options.encoder is not None:
        load_faiss()
    encoder = None if options.encoder in (None, LSA) else _make_encoder(options)
    with _draft(target) as draft:
        state = _State(draft, _fingerprint(source, options))
        if "passages" not in state.done:
            state.mark(passages=_index_texts(source, draft, options, display))
        if options.encoder is not None:
            _index_vectors(draft, options, encoder, state, display)
        count = int(state.done["passages"])
        about: dict[str, Any] = {"passages": count, "bm25": {"k1": options.k1, "b": options.b}}
        if options.encoder is not None:
            about[DENSE] = {"encoder": options.encoder, "vectors": options.vectors}
        for name in (_STATE, _SPILL, _LOCK):
            (draft / name).unlink(missing_ok=True)
        write_about(draft, about)
        replace_folder(draft, target)
    return count


def _check_options(options: IndexOptions) -> None:
    if options.vectors not in ("flat", "ivf", "hnsw"):
        raise LLDSError(f"There is no kind of vectors {options.vectors!r}: choose flat, ivf or hnsw.")
    if options.dimension < 1 or options.batch < 1:
        raise LLDSError(
            f"dimension={options.dimension} and batch={options.batch} must both be at least 1: raise them."
        )
    PostingsBuilder(options.k1, options.b)  # checks k1 and b


def _make_encoder(options: IndexOptions) -> Encoder:
    assert options.encoder is not None
    return make_encoder(options.encoder, options.query_prefix, options.passage_prefix)


def _index_texts(source: Path, draft: Path, options: IndexOptions, display: Phases) -> int:
    """Write the passages and BM25; return the number of passages."""
    with display.phase("counting the rows", 1):
        rows = count_lines(source)
    builder = PostingsBuilder(options.k1, options.b, draft / _SPILL)
    writer = PassageWriter(draft)
    ids = array("q")
    with display.phase("reading the corpus", rows) as told:
        for _, document in iter_located(source):
            passage = Passage.from_contents(document["id"], document["contents"])
            ids.append(hash(passage.id))
            writer.add(passage)
            builder.add(passage.contents)
            if len(ids) % _TELL == 0:
                told(len(ids))
    writer.close()
    _check_ids(ids, source)
    with display.phase("sorting the words", 1):
        words, postings = builder.finish(
            lambda name, length, kind: new_postings_array(draft, name, length, kind)
        )
        write_bm25(draft, words, postings.count, options.k1, options.b)
    (draft / _SPILL).unlink()
    return postings.count


def _check_ids(ids: array[int], source: Path) -> None:
    """Raise :class:`LLDSError` when an id occurs twice. Equal hashes are looked at again, in the file."""
    values, counts = np.unique(np.frombuffer(ids, np.int64), return_counts=True)
    suspects = frozenset(values[counts > 1].tolist())
    first: dict[str, str] = {}
    for where, document in iter_located(source) if suspects else ():
        name = document["id"]
        if hash(name) in suspects and name in first:
            raise LLDSError(
                f'{where}: the id "{name}" occurred before, at {first[name]}: '
                "give each document an id of its own."
            )
        if hash(name) in suspects:
            first[name] = where


def _index_vectors(
    draft: Path, options: IndexOptions, encoder: Encoder | None, state: _State, display: Phases
) -> None:
    folder, count = draft / DENSE, int(state.done["passages"])
    if state.done.get("faiss"):
        return
    encoder = encoder or _lsa(draft, count, options, display)
    if "encoded" not in state.done:
        encoder.save(folder)
        np.lib.format.open_memmap(
            folder / VECTORS, mode="w+", dtype=np.float32, shape=(count, encoder.dimension)
        )
        state.mark(encoded=0)
    if state.done["encoded"] < count:
        _encode(draft, options, encoder, state, display)
    with display.phase("building the faiss index", count) as told:
        build_faiss(folder, options.vectors, told)
    state.mark(faiss=True)


def _lsa(draft: Path, count: int, options: IndexOptions, display: Phases) -> Encoder:
    # Trained anew when a build goes on: the same postings give the same table.
    with display.phase("training word vectors", rounds()) as told:
        postings = load_postings(draft, len(WordFile(draft)), count)
        table = train_table(postings, options.dimension, told)
    folder = draft / DENSE
    folder.mkdir(exist_ok=True)
    for name in ("words.bin", "words.npy"):
        shutil.copyfile(draft / name, folder / name)
    return word_encoder(table, WordFile(folder))


def _encode(draft: Path, options: IndexOptions, encoder: Encoder, state: _State, display: Phases) -> None:
    vectors = np.lib.format.open_memmap(draft / DENSE / VECTORS, mode="r+")
    count, begin = len(vectors), int(state.done["encoded"])
    passages = PassageFile(draft, count)
    with display.phase("encoding the passages", count) as told:
        for batch, first in enumerate(range(begin, count, options.batch), start=1):
            last = min(first + options.batch, count)
            vectors[first:last] = encoder.encode_passages([passages[i].contents for i in range(first, last)])
            told(last)
            if batch % _SAVE == 0:
                vectors.flush()
                state.mark(encoded=last)
    vectors.flush()
    state.mark(encoded=count)


class _State:
    """How far the build in a draft is. A draft of other options, or of another file, is emptied."""

    def __init__(self, draft: Path, fingerprint: dict[str, Any]) -> None:
        self._path = draft / _STATE
        self._fingerprint = fingerprint
        try:
            content = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            content = {}
        known = content.get("of") == fingerprint
        self.done: dict[str, Any] = content["done"] if known else {}
        if not known:
            _empty(draft)

    def mark(self, **done: Any) -> None:
        """Note that something is done, and on disk."""
        self.done.update(done)
        atomic_write_text(self._path, json.dumps({"of": self._fingerprint, "done": self.done}))


def _fingerprint(source: Path, options: IndexOptions) -> dict[str, Any]:
    try:
        about = source.stat()
    except OSError as error:
        raise LLDSError(
            f"{source} can't be read ({error.strerror}): check the path and its permissions."
        ) from error
    return {
        "format": FORMAT,
        "corpus": [str(source.resolve()), about.st_size, about.st_mtime_ns],
        **asdict(options),
    }


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Give the draft folder of ``target``, held by this process alone."""
    draft = target.parent / f".{target.name}.building"
    busy = f"Another process is building {target}: wait for it, or name another folder."
    with ExitStack() as stack:
        try:
            draft.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(draft / _LOCK, busy))
        except OSError as error:
            raise LLDSError(f"{target} can't be written ({error.strerror}): name another folder.") from error
        yield draft


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()
