"""What ``llds ask`` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from llds.cli.painting import Painter
from llds.data.questions import Question
from llds.search.episode import EpisodeRunner, Event
from llds.search.retrieval import NoRetriever, Retriever
from llds.search.sampling import GREEDY
from llds.training.environment import silence_libraries
from llds.training.inputs import (
    check_prompts,
    make_limits,
    make_protocol,
    make_retriever,
)
from llds.training.policy import load_policy, saved_recipe
from llds.training.recipe import Recipe
from llds.training.scoring import arithmetic


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
    policy, protocol = load_policy(recipe.model), make_protocol(recipe)
    asked = Question("asked here", question, ())
    check_prompts([asked], policy.tokenizer, policy.positions, protocol, recipe)
    sampling = dataclasses.replace(GREEDY, temperature=temperature)
    runner = EpisodeRunner(policy.model, policy.tokenizer, retriever, protocol, make_limits(recipe), sampling)
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
