"""What ``llds eval`` and ``llds ask`` do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from llds.cli.painting import Painter
from llds.data.embedded import load_questions
from llds.data.questions import read_questions
from llds.evaluation.evaluate import EvalResult, evaluate, save_evaluation
from llds.search.episode import EpisodeRunner, Event
from llds.search.retrieval import NoRetriever, Retriever
from llds.search.sampling import GREEDY
from llds.training.environment import silence_libraries
from llds.training.inputs import (
    check_prompts,
    make_limits,
    make_protocol,
    make_retriever,
    sample_questions,
)
from llds.training.policy import load_policy, saved_recipe
from llds.training.progress import Display
from llds.training.recipe import Recipe


def run_evaluation(
    model: str,
    overrides: Sequence[str],
    split: str,
    questions_file: str | None,
    no_retriever: bool,
    rows_file: str | None,
    display: Display,
) -> EvalResult:
    """Score a model; see ``llds eval --help``. Raises ``LLDSError`` for what the user can mend."""
    silence_libraries()
    recipe = saved_recipe(model, overrides)
    questions = read_questions(questions_file) if questions_file else load_questions(split)
    questions = sample_questions(questions, recipe.evaluation)
    with display:
        retriever = _retriever(recipe, no_retriever)
        policy = load_policy(recipe.model)
        protocol = make_protocol(recipe)
        check_prompts(questions, policy, protocol, recipe)
        runner = EpisodeRunner(
            policy.model, policy.tokenizer, retriever, protocol, make_limits(recipe), GREEDY
        )
        with display.phase("answering", len(questions)) as count:
            result = evaluate(runner, questions, batch_size=recipe.evaluation.batch, on_progress=count)
    if rows_file:
        save_evaluation(Path(rows_file), result)
    return result


def run_question(
    model: str, question: str, overrides: Sequence[str], no_retriever: bool, temperature: float, quiet: bool
) -> dict[str, Any]:
    """Answer one question, showing the trajectory as it is written unless ``quiet``.

    Returns question, answer, searches and the whole response as plain JSON values. Raises
    ``LLDSError`` for what the user can mend.
    """
    silence_libraries()
    recipe = saved_recipe(model, overrides)
    retriever = _retriever(recipe, no_retriever)
    policy = load_policy(recipe.model)
    sampling = dataclasses.replace(GREEDY, temperature=temperature)
    runner = EpisodeRunner(
        policy.model, policy.tokenizer, retriever, make_protocol(recipe), make_limits(recipe), sampling
    )
    screen = None if quiet else _Screen()
    (episode,) = runner.run([question], on_event=screen)
    if screen is not None:
        screen.finish(episode.stop)
    return {
        "question": question,
        "answer": episode.answer,
        "stop": episode.stop,
        "queries": episode.queries,
        "response": episode.response,
    }


class _Screen:
    """Writes events to stdout as they come."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._painter = Painter()

    def __call__(self, event: Event) -> None:
        if event.kind in {"token", "observation", "correction"}:
            self._write(self._painter.feed(event.text))

    def finish(self, stop: str) -> None:
        """End the line, and say why there is no answer if there is none."""
        self._write(self._painter.flush())
        self._console.print()
        if stop != "answer":
            self._console.print(f"No answer: {_WHY[stop]}.")

    def _write(self, pieces: list[tuple[str, str]]) -> None:
        for text, style in pieces:
            self._console.print(Text(text, style=style), end="", soft_wrap=True)


_WHY = {
    "length": "the response reached its longest length",
    "turns": "all turns were used up",
    "eos": "the model ended the text",
    "tool_failed": "the search tool failed",
}


def _retriever(recipe: Recipe, no_retriever: bool) -> Retriever:
    return NoRetriever() if no_retriever else make_retriever(recipe.retrieval)
