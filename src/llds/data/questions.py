"""Questions with their gold answers, in the shapes that people have, and the searches that answer them.

- FlashRAG, and our own: ``id``, ``question``, ``golden_answers``, perhaps ``metadata``;
- Search-R1 and verl: ``reward_model.ground_truth.target``, ``data_source``, and the question in ``question``, in
  ``extra_info.question``, or behind the last "Question:" of ``prompt``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from llds.data.jsonl import Row, checked_text, kind_of, text_field
from llds.data.tables import plain, read_table
from llds.errors import LLDSError


@dataclass(frozen=True)
class Question:
    """A question.

    ``golden_answers``: the accepted answers, at least one. ``metadata``: whatever the file holds, and
    ``data_source`` where it names one; the shipped sets have ``kind``, ``hops``, ``chain`` (a list of
    ``[subject, relation, object]``, one for each hop, the last object being the answer) and ``template``.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Return the questions of ``path``: JSON lines, a JSON list (both also packed with gzip or zstd), or parquet.

    Raises :class:`llds.errors.LLDSError` naming file and row for a row that lacks a key, holds the wrong type,
    has no answers, or repeats an id.
    """
    questions: dict[str, Question] = {}
    for where, question in iter_questions(path):
        if question.id in questions:
            raise LLDSError(
                f'{where}: the id "{question.id}" occurs twice: give each question an id of its own.'
            )
        questions[question.id] = question
    return list(questions.values())


def iter_questions(path: str | os.PathLike[str]) -> Iterator[tuple[str, Question]]:
    """Yield ``(where, question)``; raises as :func:`read_questions`, but does not look for repeated ids."""
    return ((where, question_of(row, where)) for where, row in read_table(path))


def question_of(row: Row, where: str) -> Question:
    """Return the question that ``row`` holds, whatever its shape; raises as :func:`read_questions`."""
    source = row.get("data_source")
    metadata = _metadata(row, where)
    _check_hops(metadata.get("hops"), where)
    _check_chain(metadata.get("chain", []), where)
    if source is not None:
        metadata = {**metadata, "data_source": checked_text(source, '"data_source"', where)}
    return Question(
        id=_id(row, where),
        question=_question(row, where),
        golden_answers=_answers(row, where),
        metadata=metadata,
    )


def gold_queries(question: Question) -> list[str]:
    """Return the searches that find the answer hop by hop: subject and relation of each link of the chain.

    Raises :class:`llds.errors.LLDSError` for a question without a chain.
    """
    if not question.metadata.get("chain"):
        raise LLDSError(
            f'question "{question.id}" has no "chain" in its metadata: use a set that records its hops.'
        )
    return [
        f"{subject} {relation.removesuffix(' of')}" for subject, relation, _ in question.metadata["chain"]
    ]


def question_row(question: Question) -> Row:
    """Return the JSON row of ``question``; :func:`read_questions` reads it back."""
    metadata = dict(question.metadata)
    source = metadata.pop("data_source", None)
    return {
        "id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        **({} if source is None else {"data_source": source}),
        "metadata": metadata,
    }


def _metadata(row: Row, where: str) -> dict[str, Any]:
    """Return the metadata; in a table it may be JSON text, since a column has the same keys in every row."""
    given = row.get("metadata") or {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (RecursionError, ValueError):
            given = None
    if not isinstance(given, dict):
        raise LLDSError(f'{where}: "metadata" must be an object: write it as {{...}} or leave it out.')
    return cast("dict[str, Any]", plain(given))


def _id(row: Row, where: str) -> str:
    """Return the id; verl's tables have none, but a split and an index, which together are one."""
    extra = row.get("extra_info")
    if row.get("id") is None and isinstance(extra, dict) and extra.get("index") is not None:
        return f"{extra.get('split') or 'row'}_{extra['index']}"
    return text_field(row, "id", where)


def _question(row: Row, where: str) -> str:
    if row.get("question") is not None or not ("prompt" in row or "extra_info" in row):
        return text_field(row, "question", where)
    extra = row.get("extra_info")
    if isinstance(extra, dict) and extra.get("question") is not None:
        return checked_text(extra["question"], '"extra_info.question"', where)
    return _asked(row.get("prompt"), where)


def _asked(prompt: object, where: str) -> str:
    """Return the question of a prompt: what stands behind the last "Question:" of its last message."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    said = last.get("content") if isinstance(last, dict) else None
    if not isinstance(said, str) or "Question:" not in said:
        raise LLDSError(
            f'{where}: there is no question in "question", "extra_info.question", or behind "Question:" in "prompt": '
            'add a column "question".'
        )
    return checked_text(said.rpartition("Question:")[2].strip(), 'the question in "prompt"', where)


def _answers(row: Row, where: str) -> tuple[str, ...]:
    """Return the accepted answers; what a reward is computed from goes before ``golden_answers``."""
    name, answers = "golden_answers", row.get("golden_answers")
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    if truth is not None:
        name = "reward_model.ground_truth" + (".target" if isinstance(truth, dict) else "")
        answers = truth.get("target") if isinstance(truth, dict) else truth
        answers = [answers] if isinstance(answers, str) else answers
    elif "golden_answers" not in row:
        raise LLDSError(f'{where}: the row has no "golden_answers": add a list of accepted answers.')
    if not isinstance(answers, list) or not answers:
        raise LLDSError(
            f'{where}: "{name}" must be a list with at least one string, not {kind_of(answers)}: write it as ["..."].'
        )
    return tuple(checked_text(answer, f'each of "{name}"', where) for answer in answers)


def _check_hops(hops: object, where: str) -> None:
    whole = isinstance(hops, int) and not isinstance(hops, bool)
    if hops is not None and not (whole and cast(int, hops) > 0):
        raise LLDSError(f'{where}: "hops" must be a whole number from 1 on: mend it or leave it out.')


def _check_chain(chain: object, where: str) -> None:
    fits = isinstance(chain, list) and all(
        isinstance(hop, list)
        and len(hop) == 3
        and all(isinstance(part, str) and part.strip() for part in hop)
        for hop in chain
    )
    if not fits:
        raise LLDSError(
            f'{where}: "chain" must be a list of [subject, relation, object]: mend it or leave it out.'
        )
