"""The policy that a run starts from: the recipe's model, warm-started on traces where the recipe says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llds.cache import cache_folder, fingerprint
from llds.data.questions import Question
from llds.files import atomic_folder
from llds.search.protocol import Protocol
from llds.search.retrieval import Retriever
from llds.training.checkpoints import save_model_folder
from llds.training.policy import Policy, load_policy, model_source
from llds.training.progress import Display
from llds.training.recipe import Recipe
from llds.training.traces import Habits, TraceSource
from llds.training.warmstart import WarmStartPlan, warm_start


def starting_policy(
    recipe: Recipe, questions: Sequence[Question], retriever: Retriever, protocol: Protocol, display: Display
) -> Policy:
    """Return the policy that training starts from.

    ``questions``: those to train on. A warm start is done once for the same settings and kept in the cache.
    Raises :class:`LLDSError` as :func:`load_policy`, and when the questions hold no traces to imitate.
    """
    if not recipe.warm_start.steps:
        return load_policy(recipe.model)
    source = model_source(recipe.model.path)
    target = cache_folder() / "warm" / fingerprint(_identity(recipe, source, questions))
    warm = dataclasses.replace(recipe.model, path=str(target))
    if (target / "config.json").is_file():
        return load_policy(warm)
    policy = load_policy(dataclasses.replace(recipe.model, path=source))
    settings = recipe.warm_start
    habits = Habits(stop_early=settings.stop_early)
    traces = TraceSource(
        questions,
        retriever,
        protocol,
        habits,
        render=lambda text: _prompt_text(protocol, policy.tokenizer, text),
    )
    plan = WarmStartPlan(settings.steps, settings.batch, settings.learning_rate)
    # The folder is begun first, so that a cache that can't be written is known before the work is done.
    with (
        atomic_folder(target) as folder,
        display.phase("warm start on traces", settings.steps) as count,
    ):
        warm_start(policy.model, policy.tokenizer, traces, plan, on_step=lambda step, loss: count(step))
        save_model_folder(policy.model, policy.tokenizer, folder)
    return load_policy(warm)


def _prompt_text(protocol: Protocol, tokenizer: Any, question: str) -> str:
    prompt = protocol.prompt(question)
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def _identity(recipe: Recipe, source: str, questions: Sequence[Question]) -> dict[str, Any]:
    """Return everything that the warm-started weights depend on."""
    weights = sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else []
    return {
        "model": [source, *((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights)],
        "warm_start": dataclasses.asdict(recipe.warm_start),
        "retrieval": dataclasses.asdict(recipe.retrieval),
        "prompt": [recipe.episode.prompt, recipe.episode.passage_words],
        "questions": fingerprint([[one.id, one.question] for one in questions]),
    }
