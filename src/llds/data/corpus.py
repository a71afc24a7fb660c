"""Reader of corpora, JSON lines in the shapes that people have:

- wiki-18 and FlashRAG: ``id`` and ``contents``, title first, in quotes;
- BEIR: ``_id``, ``title`` and ``text``, or its folder with ``corpus.jsonl``;
- the same with ``id`` for ``_id``, and without ``title``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from llds.data.jsonl import Row, checked_text, read_rows, text_field
from llds.errors import LLDSError

Document = dict[str, str]
"""``{"id": ..., "contents": '"Title"\\ntext'}``"""

_IN_FOLDER = ("corpus.jsonl", "corpus.jsonl.gz", "corpus.jsonl.zst")


def iter_corpus(path: str | os.PathLike[str]) -> Iterator[Document]:
    """Yield the documents of ``path`` (plain, gzip or zstd JSON lines, or a BEIR folder), one at a time.

    Raises :class:`llds.errors.LLDSError` naming file and line when a row has no id or no text, or when
    ``contents`` isn't a title line followed by text.
    """
    return (document for _, document in iter_located(path))


def iter_located(path: str | os.PathLike[str]) -> Iterator[tuple[str, Document]]:
    """Yield ``(where, document)``, ``where`` being ``file:line``; else as :func:`iter_corpus`."""
    for where, row in read_rows(corpus_file(path)):
        yield where, document_of(row, where)


def corpus_file(path: str | os.PathLike[str]) -> Path:
    """Return the file behind ``path``: in a BEIR folder its corpus, else ``path`` itself."""
    source = Path(path)
    if not source.is_dir():
        return source
    for name in _IN_FOLDER:
        if (source / name).is_file():
            return source / name
    raise LLDSError(f"The folder {source} holds no corpus.jsonl (.gz, .zst): name the corpus file itself.")


def document_of(row: Row, where: str) -> Document:
    """Return the document that ``row`` holds, whatever its shape; raises as :func:`iter_corpus`."""
    id_key = "_id" if "_id" in row and "id" not in row else "id"
    name = text_field({"id": row[id_key]} if id_key in row else row, "id", where)
    if "contents" in row:
        return {"id": name, "contents": _contents(row, where)}
    title = row.get("title")
    title = "" if title is None or title == "" else checked_text(title, '"title"', where)
    if title and row.get("text") == "":  # BEIR has passages that are a title alone
        return {"id": name, "contents": join_contents(_one_line(title), "")}
    if "text" not in row:
        text_field(row, "contents", where)
    return {"id": name, "contents": join_contents(_one_line(title), text_field(row, "text", where).strip())}


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


def _contents(row: Row, where: str) -> str:
    contents = text_field(row, "contents", where)
    if not all(split_contents(contents)):
        raise LLDSError(
            f'{where}: "contents" must be a title in quotes, a newline and a text: bring it into this shape.'
        )
    return contents


def _one_line(title: str) -> str:
    return " ".join(title.split())
