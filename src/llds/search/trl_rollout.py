"""Search episodes as a ``rollout_func`` of TRL's GRPO trainer. Only touches the trainer it is handed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from llds.errors import LLDSError
from llds.search.episode import Episode, EpisodeRunner
from llds.search.protocol import encode_prompt

RolloutFunc: TypeAlias = Callable[[list[Any], Any], dict[str, Any]]


def trl_rollout_func(
    runner: EpisodeRunner,
    *,
    generator: torch.Generator | None = None,
    batch_size: int | None = None,
    on_episodes: Callable[[list[Episode]], None] | None = None,
) -> RolloutFunc:
    """Return a ``rollout_func(prompts, trainer)`` for ``trl.GRPOTrainer`` that runs episodes with its policy.

    The data set's ``prompt`` column holds what :meth:`Protocol.prompt` returns, text or messages. The
    policy is ``trainer.model``, unwrapped; ``runner.model`` is not used. Sample at the trainer's
    temperature, or TRL's log-probabilities are those of another distribution.

    ``generator``: seed it differently on every process. ``batch_size``: episodes side by side.
    ``on_episodes``: is handed the episodes of every call, in the order of the prompts.

    Raises :class:`LLDSError` for a policy whose parameters are spread over processes (FSDP, ZeRO-3), since
    processes that run episodes of different lengths would wait for each other, and for a data set with a
    column that :func:`rollout_columns` would overwrite.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        _check_whole(trainer)
        _check_columns(trainer)
        policy = runner.for_model(trainer.accelerator.unwrap_model(trainer.model))
        ids = [encode_prompt(runner.tokenizer, prompt) for prompt in prompts]
        episodes = policy.run(ids, generator=generator, batch_size=batch_size)
        if on_episodes:
            on_episodes(episodes)
        return rollout_columns(episodes)

    return rollout


def rollout_columns(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return what TRL wants of a rollout and what reward functions may ask for; one entry per episode.

    TRL: ``prompt_ids``, ``completion_ids`` (never empty), ``logprobs`` (0.0 on feedback), ``env_mask`` (1 =
    the policy wrote it). Rewards: ``answer`` (text or ``None``), ``response`` (text), ``searches``,
    ``valid_searches``, ``turns`` (counts), ``stop``, ``tool_failed``, ``answer_mask`` (per token),
    ``first_search`` (ids of the passages that the first search returned, or ``None``).
    """
    return {
        "prompt_ids": [episode.prompt_ids for episode in episodes],
        "completion_ids": [episode.response_ids for episode in episodes],
        "logprobs": [episode.logprobs for episode in episodes],
        "env_mask": [episode.response_mask for episode in episodes],
        "answer": [episode.answer for episode in episodes],
        "response": [episode.response for episode in episodes],
        "searches": [episode.searches for episode in episodes],
        "valid_searches": [episode.valid_searches for episode in episodes],
        "turns": [len(episode.turns) for episode in episodes],
        "stop": [episode.stop for episode in episodes],
        "tool_failed": [episode.tool_failed for episode in episodes],
        "answer_mask": [episode.answer_mask for episode in episodes],
        "first_search": [episode.first_search for episode in episodes],
    }


def _check_whole(trainer: Any) -> None:
    plugin = getattr(getattr(trainer.accelerator, "state", None), "deepspeed_plugin", None)
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(plugin, "zero_stage", 0) == 3:
        raise LLDSError(
            "The policy's parameters are spread over processes (FSDP or ZeRO-3): the episode runner needs "
            "them whole on every process, so use DDP or ZeRO-2."
        )


def _check_columns(trainer: Any) -> None:
    given = set(getattr(getattr(trainer, "train_dataset", None), "column_names", None) or ())
    clash = sorted(given & rollout_columns([]).keys())
    if clash:
        raise LLDSError(
            f"The data set has a column {clash[0]!r}, which the rollout would overwrite: rename it "
            "(golden answers go under golden_answers)."
        )
