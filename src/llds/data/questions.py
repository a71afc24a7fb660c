"""Questions with their gold answers, in FlashRAG's JSON-lines shape, and the searches that answer them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from llds.data.jsonl import Row, checked_text, read_rows, text_field
from llds.errors import LLDSError


@dataclass(frozen=True)
class Question:
    """A question.

    ``golden_answers``: the accepted answers, at least one. ``metadata``: whatever the file holds; the shipped
    sets have ``kind``, ``hops``, ``chain`` (a list of ``[subject, relation, object]``, one for each hop, the
    last object being the answer) and ``template``.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Return the questions of ``path``, JSON lines, plain or gzipped.

    A row has ``id``, ``question``, ``golden_answers`` and may have ``metadata``. Raises
    :class:`llds.errors.LLDSError` naming file and line for a row that lacks a key, holds the wrong type, has
    no answers, or repeats an id.
    """
    questions: dict[str, Question] = {}
    for where, row in read_rows(path):
        question = _question(row, where)
        if question.id in questions:
            raise LLDSError(
                f'{where}: the id "{question.id}" occurs twice: give each question an id of its own.'
            )
        questions[question.id] = question
    return list(questions.values())


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
    return {
        "id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        "metadata": dict(question.metadata),
    }


def _question(row: Row, where: str) -> Question:
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise LLDSError(f'{where}: "metadata" must be an object: write it as {{...}} or leave it out.')
    _check_hops(metadata.get("hops"), where)
    _check_chain(metadata.get("chain", []), where)
    return Question(
        id=text_field(row, "id", where),
        question=text_field(row, "question", where),
        golden_answers=_answers(row, where),
        metadata=metadata,
    )


def _answers(row: Row, where: str) -> tuple[str, ...]:
    if "golden_answers" not in row:
        raise LLDSError(f'{where}: the row has no "golden_answers": add a list of accepted answers.')
    answers = row["golden_answers"]
    if not isinstance(answers, list) or not answers:
        raise LLDSError(
            f'{where}: "golden_answers" must be a list with at least one string: write it as ["..."].'
        )
    return tuple(checked_text(answer, 'each of "golden_answers"', where) for answer in answers)


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
