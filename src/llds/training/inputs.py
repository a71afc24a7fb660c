"""From a recipe to what a run works on: questions, the search tool, the protocol."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from typing import Any

from llds.data.embedded import load_questions
from llds.data.questions import Question, read_questions
from llds.errors import LLDSError
from llds.retrieval.tool import EMBEDDED as EMBEDDED
from llds.retrieval.tool import open_corpus, open_server
from llds.search.episode import Limits
from llds.search.protocol import Protocol
from llds.search.remote import OnEvent
from llds.search.retrieval import Retriever
from llds.training.recipe import EvaluationSettings, Recipe, RetrievalSettings
from llds.training.settings import did_you_mean


def training_questions(recipe: Recipe) -> list[Question]:
    """Return the questions to train on; raises :class:`LLDSError` for a missing or malformed file."""
    source = recipe.data.train
    return load_questions("train") if source == EMBEDDED else read_questions(source)


def held_out_questions(recipe: Recipe) -> list[Question]:
    """Return the questions to score on: the same ones at every call, whatever the seed of the run."""
    source = recipe.data.test
    questions = load_questions(recipe.evaluation.split) if source == EMBEDDED else read_questions(source)
    return sample_questions(questions, recipe.evaluation)


def sample_questions(questions: Sequence[Question], settings: EvaluationSettings) -> list[Question]:
    """Return ``evaluation.questions`` of ``questions``, drawn once and for all; all of them for 0."""
    count = settings.questions or len(questions)
    if count >= len(questions):
        return list(questions)
    chosen = sorted(random.Random(0).sample(range(len(questions)), count))
    return [questions[index] for index in chosen]


def make_retriever(settings: RetrievalSettings, on_event: OnEvent | None = None) -> Retriever:
    """Return the search tool, tried out. ``on_event`` is told when a server fails and when it is back.

    Raises :class:`~llds.errors.LLDSError` when the corpus is missing or malformed, or the server does not
    answer.
    """
    if settings.url is None:
        return open_corpus(settings.corpus, settings.mode, section="retrieval.")
    return open_server(
        settings.url,
        timeout=settings.timeout,
        tries=settings.tries,
        deadline=settings.deadline,
        cache=settings.cache,
        token_file=settings.token_file,
        on_event=on_event,
    )


def check_reporters(names: Sequence[str]) -> None:
    """Raise :class:`LLDSError` for a name in ``run.report_to`` that is unknown or not installed."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            near = did_you_mean(name, list(INTEGRATION_TO_CALLBACK)) or f"; there are {known}."
            raise LLDSError(f"run.report_to names '{name}', which is no reporter{near}")
        if importlib.util.find_spec(name) is None:
            raise LLDSError(f"run.report_to names {name}, which is not installed; run: pip install {name}")


def make_protocol(recipe: Recipe) -> Protocol:
    """Return the wording of the episodes."""
    episode = recipe.episode
    return Protocol(
        style=episode.prompt,
        topk=recipe.retrieval.topk,
        snippet_words=episode.passage_words or None,
        correct_eos=episode.correct_eos,
    )


def make_limits(recipe: Recipe) -> Limits:
    """Return how far an episode may go."""
    episode = recipe.episode
    return Limits(
        max_turns=episode.max_turns,
        max_action_tokens=episode.max_action,
        max_observation_tokens=episode.max_observation,
        max_response_tokens=episode.max_response,
        max_prompt_tokens=episode.max_prompt,
    )


def check_prompts(
    questions: Sequence[Question], tokenizer: Any, positions: int | None, protocol: Protocol, recipe: Recipe
) -> None:
    """Raise :class:`LLDSError` for a question whose prompt is too long for recipe or model.

    ``positions``: the longest context of the model in tokens; None when it is not known.
    """
    episode = recipe.episode
    for question in questions:
        length = len(protocol.prompt_ids(tokenizer, question.question))
        if length > episode.max_prompt:
            raise LLDSError(
                f"The prompt of question '{question.id}' has {length} tokens, more than "
                f"episode.max_prompt = {episode.max_prompt}; raise it, or take the question out."
            )
        if positions is not None and length + episode.max_response > positions:
            raise LLDSError(
                f"The prompt of question '{question.id}' ({length} tokens) and a response of "
                f"episode.max_response = {episode.max_response} tokens exceed the model's {positions} positions; "
                "lower episode.max_response."
            )
