"""From the command line to the questions that are asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from llds.cli.orders import Order
from llds.data.benchmarks import BENCHMARKS, load_benchmarks
from llds.data.embedded import load_questions
from llds.data.questions import Question, read_questions
from llds.errors import LLDSError
from llds.evaluation.tasks import QuestionSet
from llds.training.inputs import EMBEDDED, sample_questions
from llds.training.recipe import EvaluationSettings, Recipe


def question_sets(order: Order, recipe: Recipe) -> tuple[list[QuestionSet], str]:
    """Return the questions to answer, and in words where they are from.

    What the options say goes first, then what the run held out.
    """
    count = int(order.questions) if order.questions and order.questions.isdecimal() else None
    file = None if count is not None else order.questions
    given = [name for name, value in _sources(order, file).items() if value]
    if len(given) > 1:
        raise LLDSError(f"{' and '.join(given)} name different questions: give one of them.")
    if order.only and not order.benchmarks:
        raise LLDSError("--only picks among benchmarks: give their folder with --benchmarks.")
    settings = recipe.evaluation
    if count is not None or order.benchmarks:
        # Benchmarks are asked whole unless a number is given.
        settings = dataclasses.replace(settings, questions=count or 0)
    if order.benchmarks:
        found = load_benchmarks(order.benchmarks, order.only)
        return [
            make_set(name, questions, settings, BENCHMARKS[name].published)
            for name, questions in found.items()
        ], order.benchmarks
    source = file or (EMBEDDED if order.split else recipe.data.test)
    split = order.split or recipe.evaluation.split
    questions = load_questions(split) if source == EMBEDDED else read_questions(source)
    name = split if source == EMBEDDED else Path(source).name.partition(".")[0]
    return [make_set(name, questions, settings)], (
        f"the embedded {split} split" if source == EMBEDDED else source
    )


def make_set(
    name: str, questions: Sequence[Question], settings: EvaluationSettings, published: int | None = None
) -> QuestionSet:
    """Return the part of ``questions`` that ``settings`` ask for, the same at every call."""
    asked = tuple(sample_questions(questions, settings))
    return QuestionSet(name, asked, len(questions), published)


def _sources(order: Order, file: str | None) -> dict[str, str | None]:
    return {"--split": order.split, "--questions FILE": file, "--benchmarks": order.benchmarks}
