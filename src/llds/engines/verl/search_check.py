"""The settings of search episodes, looked at in the process that was started, before Ray.

A hydra callback, which the group ``llds_search`` puts into ``hydra.callbacks``. verl itself builds an agent loop in
a worker only, when the first question comes, and goes on without the questions that fail.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from llds.engines.verl.searching import NAME, SearchOptions, open_tool
from llds.errors import LLDSError

_ROLLOUT = "actor_rollout_ref.rollout"


class SearchCheck(Callback):
    """Tries the search tool and prints what it is; a mistake ends the command with one sentence."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Look at the configuration of a run; hydra calls it before the command's own code."""
        # hydra makes a warning of an exception here, so what is to stop has to leave by another door.
        try:
            told = check(config)
        except LLDSError as error:
            raise SystemExit(f"LLDS: {error}") from None
        sys.stdout.write(told + "\n")
        sys.stdout.flush()


def check(config: DictConfig) -> str:
    """Return in a line what the episodes will search; opens the tool once.

    Raises :class:`LLDSError` for settings that can't be meant and for a tool that can't be used.
    """
    settings = OmegaConf.select(config, NAME, default={})
    settings = OmegaConf.to_container(settings, resolve=True) if OmegaConf.is_config(settings) else settings
    if not isinstance(settings, Mapping):
        raise LLDSError(f"{NAME} must hold settings, but is {settings!r}.")
    options = SearchOptions.of({str(name): value for name, value in settings.items()})
    options.protocol()
    prompt, response = (
        _tokens(config, "data.max_prompt_length"),
        _tokens(config, "data.max_response_length"),
    )
    limits = options.limits(prompt, response)
    if limits.max_turns and limits.max_response_tokens <= limits.max_action_tokens:
        raise LLDSError(
            f"data.max_response_length = {response} has no room for more than one action of "
            f"{NAME}.max_action = {options.max_action} tokens: it is for all actions and search results of an "
            "episode together; raise it."
        )
    open_tool(options)
    where = options.url or f"{options.corpus} in each agent worker"
    return (
        f"LLDS: search in {where}, {options.topk} passages a search; up to {options.max_turns} searches, "
        f"{options.max_action} tokens an action, {options.max_observation} a result, {response} altogether."
        + _slow_stop(config)
    )


def _slow_stop(config: DictConfig) -> str:
    skips = OmegaConf.select(config, f"{_ROLLOUT}.skip_tokenizer_init")
    if not skips or OmegaConf.select(config, f"{_ROLLOUT}.name") == "vllm":
        return ""
    return (
        "\nLLDS: the inference engine has no tokenizer, so it can't stop at a closing tag and writes every action "
        f"to its limit; the rest is thrown away: set {_ROLLOUT}.skip_tokenizer_init=False."
    )


def _tokens(config: DictConfig, key: str) -> int:
    value = OmegaConf.select(config, key)
    if not isinstance(value, int):
        raise LLDSError(f"{key} must be a whole number of tokens, but is {value!r}.")
    return value
