"""Retrievers: BM25 in this process, a client for Search-R1's retrieval server, and none at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llds.errors import LLDSError
from llds.search.bm25 import BM25Retriever
from llds.search.passages import Passage
from llds.search.remote import HTTPRetriever, RetrieverUnavailable

__all__ = [
    "BM25Retriever",
    "HTTPRetriever",
    "NoRetriever",
    "Passage",
    "Retriever",
    "RetrieverUnavailable",
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
