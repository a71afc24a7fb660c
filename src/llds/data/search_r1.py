"""Questions as the table that Search-R1 and verl train on: parquet, one row a question."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from llds.data.questions import Question
from llds.files import atomic_write_bytes

#: What ``data_source`` says of questions whose set has no name of its own.
UNNAMED = "llds"


def search_r1_row(question: Question, prompt: str, split: str, index: int) -> dict[str, Any]:
    """Return a question as a row of Search-R1's table; ``prompt`` is what the user says to the model.

    ``metadata`` is JSON text, for it has other keys in every row, which a column can't have.
    """
    answers = list(question.golden_answers)
    return {
        "id": question.id,
        "question": question.question,
        "golden_answers": answers,
        "data_source": str(question.metadata.get("data_source") or UNNAMED),
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "metadata": json.dumps(_rest(question), ensure_ascii=False),
        "extra_info": {"split": split, "index": index, "id": question.id, "question": question.question},
    }


def _rest(question: Question) -> dict[str, Any]:
    return {key: value for key, value in question.metadata.items() if key != "data_source"}


def write_search_r1(
    path: str | os.PathLike[str], questions: Sequence[Question], prompt: Callable[[str], str], split: str
) -> None:
    """Write questions as such a table, atomically. ``prompt`` makes what is said to the model of a question."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [search_r1_row(one, prompt(one.question), split, index) for index, one in enumerate(questions)]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    atomic_write_bytes(path, buffer.getvalue())
