"""Who answers: the agent, or one of the baselines that tell what its searching is worth.

``no-search`` answers at once, from what the model knows. ``one-shot`` is given what one search with the question
itself finds, and answers (retrieval-augmented generation). Both write one action with the model, the wording and
the limits of the agent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llds.inference.engine import Game
from llds.search.protocol import (
    OBSERVATION_OPEN,
    Answer,
    Prompt,
    complete_question,
    encode_prompt,
    parse_action,
)
from llds.search.retrieval import NoRetriever, search_checked
from llds.search.rules import observation_ids
from llds.search.tokens import TokenText
from llds.search.trajectory import Episode

Baseline = Literal["no-search", "one-shot"]
NO_SEARCH: Baseline = "no-search"
ONE_SHOT: Baseline = "one-shot"
BASELINES: tuple[Baseline, ...] = (NO_SEARCH, ONE_SHOT)

_ANSWER = (
    "You must conduct reasoning inside <think> and </think> first. Then give the answer inside <answer> and "
    "</answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
)
NO_SEARCH_INSTRUCTION = f"Answer the given question. {_ANSWER}"
ONE_SHOT_INSTRUCTION = (
    "Answer the given question with the help of what a search engine found for it, between <information> and "
    f"</information>. {_ANSWER}"
)

_OPENINGS = {NO_SEARCH: "<think> I think it is", ONE_SHOT: "<think> It is"}


@dataclass(frozen=True)
class Contestant:
    """Somebody who answers questions.

    ``prompts``: from questions to token ids; raises :class:`~llds.search.retrieval.RetrieverUnavailable` when a
    search for them fails. ``read``: what an episode means. ``searches``: how many are
    made for every question; None counts those of the model.
    """

    name: str
    game: Game
    prompts: Callable[[Sequence[str]], list[list[int]]]
    read: Callable[[Episode], Episode] = lambda episode: episode
    searches: int | None = None


def make_agent(name: str, tokenizer: Any, game: Game) -> Contestant:
    """Return the policy itself: it searches as often as it likes."""

    def prompts(questions: Sequence[str]) -> list[list[int]]:
        return [game.protocol.prompt_ids(tokenizer, question) for question in questions]

    return Contestant(name, game, prompts)


def make_baseline(baseline: Baseline, tokenizer: Any, game: Game) -> Contestant:
    """Return a baseline with the model and the search tool of the agent."""
    text = TokenText(tokenizer)
    short = game.protocol.style == "short"
    # A model that knows the protocol alone can't be told what to do, so its answer is begun for it, with a thought:
    # a model that has learnt to think first does worse when it is made to answer at once.
    opening = _OPENINGS[baseline] if short else ""

    def informed(questions: Sequence[str]) -> list[str]:
        """Return what is shown beside each question."""
        if baseline == NO_SEARCH:
            return [""] * len(questions)
        queries = [complete_question(question) for question in questions]
        found = search_checked(game.retriever, queries, game.protocol.topk)
        return [
            text.decode(observation_ids(text, game.protocol, game.limits, passages, query))
            for query, passages in zip(queries, found, strict=True)
        ]

    def prompts(questions: Sequence[str]) -> list[list[int]]:
        shown = zip(questions, informed(questions), strict=True)
        if short:
            return [
                encode_prompt(tokenizer, game.protocol.prompt(question))
                + text.encode(_as_searched(question, information) + opening)
                for question, information in shown
            ]
        return [encode_prompt(tokenizer, _instructed(game, *one)) for one in shown]

    limits = dataclasses.replace(
        game.limits,
        max_turns=0,
        max_prompt_tokens=game.limits.max_prompt_tokens + game.limits.max_observation_tokens,
        max_response_tokens=game.limits.max_action_tokens,
    )
    return Contestant(
        name=baseline,
        game=Game(NoRetriever(), game.protocol, limits),
        prompts=prompts,
        read=lambda episode: _opened(episode, opening),
        searches=int(baseline == ONE_SHOT),
    )


def _as_searched(question: str, information: str) -> str:
    """Return the search for the question as an agent would have written it, with what was found."""
    return f"<search> {complete_question(question)} </search>{information}" if information else ""


def _instructed(game: Game, question: str, information: str) -> Prompt:
    instruction = ONE_SHOT_INSTRUCTION if information else NO_SEARCH_INSTRUCTION
    shown = f"\n\n{information.removeprefix(OBSERVATION_OPEN[:2]).strip()}\n\n" if information else ""
    text = f"{instruction}{shown}Question: {complete_question(question)}\n"
    return [{"role": "user", "content": text}] if game.protocol.style == "search-r1-instruct" else text


def _opened(episode: Episode, opening: str) -> Episode:
    """Read an episode of one action whose first words stood in the prompt."""
    if not opening or not episode.turns:
        return episode
    turn = episode.turns[0]
    whole = opening + turn.text
    action = parse_action(whole)
    turns = [dataclasses.replace(turn, action=action, text=whole)]
    if not isinstance(action, Answer):
        return dataclasses.replace(episode, turns=turns)
    return dataclasses.replace(episode, turns=turns, answer=action.text, stop="answer")
