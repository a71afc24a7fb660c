"""Reader of corpora in the shape of wiki-18: JSON lines of ``id`` and ``contents``, title first, in quotes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from llds.data.jsonl import read_rows, text_field
from llds.errors import LLDSError

Document = dict[str, str]
"""``{"id": ..., "contents": '"Title"\\ntext'}``"""


def iter_corpus(path: str | os.PathLike[str]) -> Iterator[Document]:
    """Yield the documents of ``path`` (plain or gzipped JSON lines), one at a time.

    Raises :class:`llds.errors.LLDSError` naming file and line when a row lacks ``id`` or ``contents``, or
    when ``contents`` isn't a title line followed by text.
    """
    for where, row in read_rows(path):
        document = {key: text_field(row, key, where) for key in ("id", "contents")}
        title, text = split_contents(document["contents"])
        if not title or not text:
            raise LLDSError(
                f'{where}: "contents" must be a title in quotes, a newline and a text: bring it into this shape.'
            )
        yield document


def read_corpus(path: str | os.PathLike[str]) -> list[Document]:
    """Return the documents of ``path``; raises as :func:`iter_corpus`, and when an id occurs twice."""
    documents = list(iter_corpus(path))
    seen: set[str] = set()
    for document in documents:
        if document["id"] in seen:
            raise LLDSError(
                f'{path}: the id "{document["id"]}" occurs twice: give each document an id of its own.'
            )
        seen.add(document["id"])
    return documents


def split_contents(contents: str) -> tuple[str, str]:
    """Split ``contents`` into title (without its quotes) and text, both stripped."""
    title, _, text = contents.partition("\n")
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title.strip(), text.strip()


def join_contents(title: str, text: str) -> str:
    """Return ``contents`` for a title and a text; the inverse of :func:`split_contents`."""
    return f'"{title}"\n{text}'
