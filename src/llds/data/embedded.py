"""The corpus and the questions that are shipped with the package; see docs/data.md for what they are."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from llds.data.corpus import Document, read_corpus
from llds.data.questions import Question, read_questions
from llds.errors import LLDSError

SPLITS = ("train", "validation", "test")


def load_corpus() -> list[Document]:
    """Return the shipped passages, about 46 thousand, as ``{"id", "contents"}`` rows."""
    return read_corpus(corpus_path())


def load_questions(split: str) -> list[Question]:
    """Return the shipped questions of ``split``; raises :class:`llds.errors.LLDSError` if there is none."""
    return read_questions(questions_path(split))


def load_manifest() -> dict[str, Any]:
    """Return the record of the shipped files: counts, sources, sizes in bytes and SHA-256 sums."""
    manifest: dict[str, Any] = json.loads(asset_path("manifest.json").read_text(encoding="utf-8"))
    return manifest


def corpus_path() -> Path:
    """Return the path of the shipped corpus (gzipped JSON lines)."""
    return asset_path("corpus.jsonl.gz")


def questions_path(split: str) -> Path:
    """Return the path of the shipped questions of ``split`` (gzipped JSON lines)."""
    if split not in SPLITS:
        raise LLDSError(f'there is no split "{split}": use one of {", ".join(SPLITS)}.')
    return asset_path(f"questions_{split}.jsonl.gz")


def asset_path(name: str) -> Path:
    """Return the path of a shipped file."""
    return Path(str(files("llds.data").joinpath("assets", name)))
