"""What ``llds eval`` and ``llds ask`` do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from llds.cli.painting import Painter
from llds.data.embedded import load_questions
from llds.data.questions import Question, read_questions
from llds.errors import LLDSError
from llds.evaluation.evaluate import EvalResult, evaluate
from llds.search.episode import EpisodeRunner, Event
from llds.search.retrieval import NoRetriever, Retriever
from llds.search.sampling import GREEDY
from llds.training.environment import silence_libraries
from llds.training.inputs import (
    EMBEDDED,
    check_prompts,
    make_limits,
    make_protocol,
    make_retriever,
    sample_questions,
)
from llds.training.policy import load_policy, saved_recipe
from llds.training.progress import Display
from llds.training.recipe import Recipe
from llds.training.scoring import arithmetic


def run_evaluation(
    model: str,
    overrides: Sequence[str],
    split: str | None,
    questions_file: str | None,
    no_retriever: bool,
    display: Display,
) -> EvalResult:
    """Score a model; see ``llds eval --help``. Raises ``LLDSError`` for what the user can mend."""
    silence_libraries()
    recipe = saved_recipe(model, overrides)
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    questions, source = _questions(recipe, split, questions_file)
    with display:
        display.note(f"Answering {len(questions)} questions of {source}.")
        retriever = _retriever(recipe, no_retriever)
        policy = load_policy(recipe.model)
        protocol = make_protocol(recipe)
        check_prompts(questions, policy, protocol, recipe)
        runner = EpisodeRunner(
            policy.model, policy.tokenizer, retriever, protocol, make_limits(recipe), GREEDY
        )
        with (
            display.phase("answering", len(questions)) as count,
            arithmetic(policy.model, recipe.model),
        ):
            result = evaluate(runner, questions, batch_size=recipe.evaluation.batch, on_progress=count)
    return result


def _questions(recipe: Recipe, split: str | None, file: str | None) -> tuple[list[Question], str]:
    """Return the questions to answer, and in words where they are from.

    What the options say goes first, then what the run held out.
    """
    if split is not None and file is not None:
        raise LLDSError("--split takes embedded questions and --questions those of a file; give one of them.")
    source = file or (EMBEDDED if split else recipe.data.test)
    split = split or recipe.evaluation.split
    if source == EMBEDDED:
        return sample_questions(load_questions(split), recipe.evaluation), f"the embedded {split} split"
    return sample_questions(read_questions(source), recipe.evaluation), source


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
    with arithmetic(policy.model, recipe.model):
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
            # What a tool found is not to be trusted with the terminal.
            self._console.print(Text(text.translate(_HARMLESS), style=style), end="", soft_wrap=True)


_HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_WHY = {
    "length": "the response reached its longest length",
    "turns": "all turns were used up",
    "eos": "the model ended the text",
    "tool_failed": "the search tool failed",
}


def _retriever(recipe: Recipe, no_retriever: bool) -> Retriever:
    return NoRetriever() if no_retriever else make_retriever(recipe.retrieval)
