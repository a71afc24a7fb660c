"""Writes corpus, questions and manifest so that the same input gives the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llds.data.build.facts import Passage
from llds.data.build.sources import PACKAGES
from llds.data.corpus import join_contents
from llds.data.jsonl import Row
from llds.data.questions import Question, question_row
from llds.files import atomic_write_bytes, atomic_write_text


def write_assets(
    folder: Path, passages: Sequence[Passage], splits: Mapping[str, Sequence[Question]]
) -> dict[str, Any]:
    """Write ``corpus.jsonl.gz``, ``questions_<split>.jsonl.gz`` and ``manifest.json``; return the manifest."""
    contents = (join_contents(passage.title, passage.text) for passage in passages)
    corpus = [{"id": str(place), "contents": text} for place, text in enumerate(contents)]
    files = {"corpus.jsonl.gz": corpus}
    files |= {
        f"questions_{split}.jsonl.gz": [question_row(each) for each in group]
        for split, group in splits.items()
    }
    manifest = {
        "files": {name: _write(folder / name, rows) for name, rows in files.items()},
        "passages": dict(sorted(Counter(passage.source for passage in passages).items())),
        "sources": PACKAGES,
    }
    atomic_write_text(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    return manifest


def _write(path: Path, rows: Iterable[Row]) -> dict[str, Any]:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    data = gzip.compress("".join(lines).encode("utf-8"), compresslevel=9, mtime=0)
    atomic_write_bytes(path, data)
    return {"rows": len(lines), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
