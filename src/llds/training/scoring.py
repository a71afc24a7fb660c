"""Scoring the policy of a run on its held-out questions; every evaluation is made once and kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import PartialState

from llds.data.questions import Question
from llds.evaluation.evaluate import EvalResult, evaluate, load_evaluation, save_evaluation
from llds.search.episode import EpisodeRunner
from llds.search.protocol import Protocol
from llds.search.retrieval import NoRetriever, Retriever
from llds.search.sampling import GREEDY
from llds.training.inputs import make_limits
from llds.training.policy import Policy
from llds.training.progress import Display
from llds.training.recipe import ModelSettings, Recipe
from llds.training.records import RunFolder

BEFORE, AFTER = "before", "after"
WITHOUT_RETRIEVER = "-without-retriever"


def arithmetic(model: Any, settings: ModelSettings) -> AbstractContextManager[Any]:
    """Return the context in which ``model`` computes in the number format that ``model.dtype`` says."""
    half = settings.dtype == "bfloat16"
    return torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=half)


class Scorer:
    """Scores ``policy`` as it is at the time, greedily."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        policy: Policy,
        questions: Sequence[Question],
        retriever: Retriever,
        protocol: Protocol,
        display: Display,
    ) -> None:
        self._recipe = recipe
        self._run = run
        self._policy = policy
        self._questions = questions
        self._retriever = retriever
        self._protocol = protocol
        self._display = display

    def score_both(self, name: str) -> None:
        """Score with the search tool, and without it where the recipe says so; other processes wait."""
        if PartialState().is_main_process:
            self._score(name, self._retriever)
            if self._recipe.evaluation.without_retriever:
                self._score(name + WITHOUT_RETRIEVER, NoRetriever())
        PartialState().wait_for_everyone()

    def score_rollout(self, rollouts: int) -> None:
        """Score in the middle of training, after ``rollouts`` rollouts."""
        result = self._score(f"rollout-{rollouts:06d}", self._retriever)
        self._run.event("evaluation", rollout=rollouts, groups=result.to_json()["groups"])
        match = result.groups["all"].exact_match
        self._display.note(f"After {rollouts} rollouts: exact match {100 * match.value:.1f} %.")

    def _score(self, name: str, retriever: Retriever) -> EvalResult:
        path = self._run.evaluation(name)
        if path.exists():
            return load_evaluation(path)
        runner = EpisodeRunner(
            self._policy.model,
            self._policy.tokenizer,
            retriever,
            self._protocol,
            make_limits(self._recipe),
            GREEDY,
        )
        with (
            self._display.phase(f"scoring {name.replace('-', ' ')}", len(self._questions)) as count,
            arithmetic(self._policy.model, self._recipe.model),
        ):
            batch = self._recipe.evaluation.batch
            result = evaluate(runner, self._questions, batch_size=batch, on_progress=count)
        save_evaluation(path, result)
        return result
