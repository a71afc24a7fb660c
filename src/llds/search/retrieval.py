"""Retrievers: BM25 in this process, a client for Search-R1's retrieval server, and none at all."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from llds.errors import LLDSError
from llds.search.bm25 import BM25Retriever
from llds.search.passages import Passage
from llds.search.remote import HTTPRetriever, RetrieverUnavailable

__all__ = [
    "BM25Retriever",
    "HTTPRetriever",
    "InTurn",
    "NoRetriever",
    "Passage",
    "Retriever",
    "RetrieverUnavailable",
    "for_threads",
    "search_checked",
]


class Retriever(Protocol):
    """Anything that finds passages for queries."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return for every query its passages, best first, at most ``topk``; none for an empty query.

        Raises :class:`RetrieverUnavailable` when the tool is out of order, which is never the policy's fault.
        """
        ...


class NoRetriever:
    """The retriever switched off: every search comes back empty."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return an empty list for every query."""
        return [[] for _ in queries]


class InTurn:
    """A retriever that is asked by one thread at a time."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._lock = threading.Lock()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """See :class:`Retriever`."""
        with self._lock:
            return self._retriever.search(queries, topk)


def for_threads(retriever: Retriever) -> Retriever:
    """Return a retriever that several threads may ask: the client of a server as it is, others in turn."""
    return retriever if isinstance(retriever, HTTPRetriever) else InTurn(retriever)


def search_checked(retriever: Retriever, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """Ask ``retriever`` once for all ``queries`` and make sure that it answers each.

    Raises :class:`LLDSError` when the number of answers differs: they could not be told apart.
    """
    if not queries:
        return []
    answers = retriever.search(queries, topk)
    if len(answers) != len(queries):
        name = type(retriever).__name__
        raise LLDSError(
            f"{name} answered {len(answers)} of {len(queries)} queries: it must answer each, in order."
        )
    return answers
