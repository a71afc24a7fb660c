"""TRL's rollout function and reward function, made of search episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llds.data.questions import Question
from llds.search.episode import Episode, EpisodeRunner
from llds.search.retrieval import RetrieverUnavailable
from llds.search.rewards import exact_match, f1_score, valid_format
from llds.search.trl_rollout import rollout_columns
from llds.training.plan import Plan, rollout_seed
from llds.training.recipe import Recipe, RewardSettings


class Rollouts:
    """Runs the episodes of a rollout; keeps the newest ones for who wants to look at them.

    A TRL ``rollout_func``: call it with the questions, one per response, and the trainer. The random numbers
    of a rollout depend on the seed of the run, the rollout's index and the process alone.
    """

    def __init__(self, runner: EpisodeRunner, recipe: Recipe, plan: Plan, attempt: int = 0) -> None:
        self._runner = runner
        self._recipe = recipe
        self._plan = plan
        self._attempt = attempt
        self.episodes: list[Episode] = []

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Return prompts, completions, masks and episodes in TRL's form.

        Raises :class:`RetrieverUnavailable` on every process when no episode of any had a working search
        tool.
        """
        accelerator = trainer.accelerator
        index = self._plan.rollout(trainer.state.global_step)
        seed = rollout_seed(self._recipe.run.seed, "rollout", index, accelerator.process_index, self._attempt)
        self.episodes = self._runner.for_model(accelerator.unwrap_model(trainer.model)).run(
            prompts,
            generator=torch.Generator().manual_seed(seed),
            batch_size=self._recipe.sampling.batch,
        )
        alive = sum(not episode.tool_failed for episode in self.episodes)
        if accelerator.gather(torch.tensor([alive], device=accelerator.device)).sum() == 0:
            raise RetrieverUnavailable(
                f"The search tool failed in every episode of rollout {index + 1}; check it, then run the "
                "same command again to go on."
            )
        return {**rollout_columns(self.episodes), "episode": self.episodes}


def make_reward(
    settings: RewardSettings,
    questions: Sequence[Question],
    on_scored: Callable[[Sequence[Episode], Sequence[Question], Sequence[float]], None],
) -> Callable[..., list[float]]:
    """Return TRL's reward function over the episodes of a rollout; it also logs what happened in them.

    ``on_scored`` is told the episodes of each rollout, their questions and their rewards.
    """

    def total_reward(
        episode: Sequence[Episode], question_index: Sequence[int], log_metric: Any, **others: Any
    ) -> list[float]:
        asked = [questions[index] for index in question_index]
        pairs = list(zip(episode, asked, strict=True))
        rewards = [reward_of(one, question.golden_answers, settings) for one, question in pairs]
        for one, question in pairs:
            if not one.tool_failed:
                for name, value in episode_metrics(one, question.golden_answers).items():
                    log_metric(name, value)
        on_scored(episode, asked, rewards)
        return rewards

    return total_reward


def reward_of(episode: Episode, golden_answers: Sequence[str], settings: RewardSettings) -> float:
    """Return the weighted sum of exact match, F1 and well-formedness of one episode."""
    return (
        settings.exact_match * exact_match(episode.answer, golden_answers)
        + settings.f1 * f1_score(episode.answer, golden_answers)
        + settings.valid_format * valid_format(episode.response)
    )


def episode_metrics(episode: Episode, golden_answers: Sequence[str]) -> dict[str, float]:
    """Return the numbers of one episode whose means are logged with each rollout."""
    return {
        "exact_match": exact_match(episode.answer, golden_answers),
        "searches": float(episode.searches),
        "valid_searches": float(episode.valid_searches),
        "answered": float(episode.stop == "answer"),
        "cut_off": float(episode.stop == "length"),
        "turns": float(len(episode.turns)),
    }
