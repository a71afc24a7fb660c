"""From settings to the search tool of an episode: a server, an index folder, or a corpus held in this process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from llds.cache import cache_folder, fingerprint
from llds.data.corpus import corpus_file, read_corpus
from llds.data.embedded import corpus_path
from llds.errors import LLDSError
from llds.retrieval.opening import Mode, open_index
from llds.search.indexfiles import is_index
from llds.search.remote import OnEvent, read_token
from llds.search.retrieval import BM25Retriever, HTTPRetriever, Retriever

#: Name of the corpus that is shipped with the package.
EMBEDDED = "embedded"


def open_server(
    url: str,
    *,
    timeout: float,
    tries: int,
    deadline: float | None,
    cache: int,
    token_file: str | None,
    on_event: OnEvent | None = None,
) -> HTTPRetriever:
    """Return the client of a server that has answered once; see :class:`HTTPRetriever` for the settings.

    ``on_event`` is told when the server fails and when it is back. Raises :class:`LLDSError` when the server
    does not answer or the token can't be read.
    """
    remote = HTTPRetriever(
        url,
        timeout=timeout,
        tries=tries,
        deadline=deadline,
        cache=cache,
        token=read_token(token_file),
        on_event=on_event,
    )
    remote.probe()
    return remote


def open_corpus(corpus: str, mode: Mode = "auto", *, section: str = "") -> Retriever:
    """Return what searches ``corpus`` in this process: ``embedded``, a corpus file, or a folder of ``llds index``.

    The index of a corpus file is built once and kept in the cache. ``section``: what stands before the names of the
    settings where the user wrote them, as ``retrieval.``. Raises :class:`LLDSError` when the corpus is missing or
    malformed.
    """
    if is_index(Path(corpus)):
        return open_index(corpus, mode)
    if mode != "auto":
        raise LLDSError(
            f"{section}mode={mode} needs an index folder, which {corpus} is not: build one "
            f"with llds index, and give it as {section}corpus."
        )
    return _indexed(corpus_path() if corpus == EMBEDDED else Path(corpus), section)


def _indexed(corpus: Path, section: str) -> BM25Retriever:
    corpus = corpus_file(corpus)
    if not corpus.is_file():
        raise LLDSError(f"There is no corpus file {corpus}; check {section}corpus.")
    about = corpus.stat()
    kept = cache_folder() / "index" / fingerprint([str(corpus.resolve()), about.st_size, about.st_mtime_ns])
    if kept.is_dir():
        # A damaged index is built anew.
        with suppress(LLDSError):
            return BM25Retriever.load(kept)
    retriever = BM25Retriever(read_corpus(corpus))
    # Without room for a cache the index serves this process alone.
    with suppress(OSError, LLDSError):
        retriever.save(kept)
    return retriever
