"""From one shape of questions to another: JSON lines as FlashRAG has them, or the table of Search-R1 and verl."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from llds.data.questions import Question, question_row
from llds.data.search_r1 import write_search_r1
from llds.errors import LLDSError
from llds.files import atomic_write_bytes

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


def write_questions(
    path: Path, questions: Sequence[Question], prompt: Callable[[str], str], split: str
) -> None:
    """Write questions in the shape that the name of ``path`` asks for, atomically.

    ``prompt``, ``split``: for the table alone. Raises :class:`LLDSError` for another ending.
    """
    if path.name.endswith(".parquet"):
        write_search_r1(path, questions, prompt, split)
        return
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise LLDSError(f"{path} names no shape that can be written: end it in {', '.join(ENDINGS)}.")
    lines = "".join(json.dumps(question_row(one), ensure_ascii=False) + "\n" for one in questions).encode()
    # Without a time in its head the same questions give the same file.
    atomic_write_bytes(path, gzip.compress(lines, mtime=0) if path.name.endswith(".gz") else lines)
