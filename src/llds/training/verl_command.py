"""A recipe in verl's words: the same settings as a command line of ``verl.trainer.main_ppo``.

Pure: it reads the recipe alone and needs no verl. What verl cannot do is an error, never left out in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llds.errors import LLDSError
from llds.preflight import Report, check_setup
from llds.preflight.verl import setup_of_verl, with_overrides
from llds.retrieval.tool import EMBEDDED
from llds.training.recipe import Recipe

#: Where verl finds the settings of LLDS, which are one word of its command line then.
CONFIG_PATH = "pkg://llds.engines.verl.conf"
#: The regulariser, and the search episodes with their reward.
_GROUPS = ("+llds@_global_=default", "+llds_search@_global_=default")

#: grpo.loss -> verl's registered loss, and how it averages. verl has no others of ours.
_LOSSES = {
    "dapo": ("vanilla", "token-mean"),
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}
#: What Hydra's grammar takes bare: words of these, with nothing that reads as syntax.
_NEEDS_QUOTES = re.compile(r"[^A-Za-z0-9_./:\-]|^$")
_EPISODE = ("prompt", "max_turns", "max_action", "max_observation", "passage_words", "correct_eos")
_RETRIEVAL = ("mode", "url", "topk", "timeout", "tries", "deadline", "cache")
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"


@dataclass(frozen=True)
class Files:
    """What a command reads and writes. ``model``: a folder, or a name on the Hub."""

    model: str
    train: Path
    test: Path
    checkpoints: Path


def verl_overrides(recipe: Recipe, files: Files) -> list[str]:
    """Return the words after ``python -m verl.trainer.main_ppo``.

    Raises :class:`LLDSError` for a setting that verl has not, and for sizes that do not divide.
    """
    _check(recipe)
    settings = (
        _data(recipe, files)
        | _model(recipe, files)
        | _generation(recipe, files)
        | _objective(recipe)
        | _optimizer(recipe)
        | _episodes(recipe)
        | _rewards(recipe)
        | _trainer(recipe, files)
    )
    words = [f"{key}={_written(value)}" for key, value in settings.items()]
    return [f"hydra.searchpath=[{CONFIG_PATH}]", *_GROUPS, *words, *_llds(recipe)]


def check_verl_recipe(recipe: Recipe) -> Report:
    """Look for every fault that a recipe shows once it is in verl's words; raises as :func:`verl_overrides`."""
    nowhere = Path()
    return look_at(verl_overrides(recipe, Files(recipe.model.path, nowhere, nowhere, nowhere)))


def look_at(words: Sequence[str]) -> Report:
    """Return what the words of a verl command say about LLDS."""
    return check_setup(setup_of_verl(with_overrides({}, words)))


def mini_batch(recipe: Recipe) -> int:
    """Return ``ppo_mini_batch_size``, which verl counts in questions; raises :class:`LLDSError` if it is not whole."""
    grpo, gpus = recipe.grpo, recipe.scale.nodes * recipe.scale.gpus
    if grpo.questions % grpo.steps_per_rollout:
        raise LLDSError(
            f"verl cuts a rollout by questions: grpo.questions = {grpo.questions} can't be split into "
            f"grpo.steps_per_rollout = {grpo.steps_per_rollout} equal parts; change one of them."
        )
    size = grpo.questions // grpo.steps_per_rollout
    if size * grpo.responses % gpus:
        raise LLDSError(
            f"One optimizer step has {size} questions × grpo.responses = {grpo.responses}: {size * grpo.responses} "
            f"responses can't be shared among scale.nodes × scale.gpus = {gpus} GPUs; change one of them."
        )
    return size


def _check(recipe: Recipe) -> None:
    """Refuse what verl would leave out in silence."""
    grpo, llds = recipe.grpo, recipe.llds
    if grpo.loss not in _LOSSES:
        _refuse("grpo.loss", grpo.loss, f"choose one of {', '.join(_LOSSES)}")
    if grpo.importance == "sequence" and grpo.loss not in {"dapo", "grpo"}:
        _refuse("grpo.importance=sequence with grpo.loss", grpo.loss, "take grpo.loss=grpo")
    if grpo.schedule == "linear":
        _refuse("grpo.schedule", "linear", "choose constant or cosine")
    if grpo.scale_rewards == "batch":
        _refuse("grpo.scale_rewards", "batch", "choose group or none")
    if llds.baseline == "anchor":
        _refuse("llds.baseline", "anchor", "take llds.baseline=old and 2 or more grpo.steps_per_rollout")
    if llds.baseline == "reference" and not grpo.beta:
        _refuse("llds.baseline", "reference", "set grpo.beta above 0, with which verl keeps that policy")
    if llds.normalizer == "preserved":
        _refuse(
            "llds.normalizer",
            "preserved",
            "take llds.normalizer=all (a larger llds.coef acts as strongly there)",
        )
    if llds.warmup:
        _refuse("llds.warmup", llds.warmup, "set llds.warmup=0")
    if recipe.warm_start.steps:
        _refuse(
            "warm_start.steps",
            recipe.warm_start.steps,
            "warm-start with engine=trl and give that run as model.path",
        )
    if recipe.dynamics.on_alarm != "warn":
        _refuse("dynamics.on_alarm", recipe.dynamics.on_alarm, "take warn, and watch the run with llds watch")
    if recipe.dynamics.probe_every:
        _refuse("dynamics.probe_every", recipe.dynamics.probe_every, "set dynamics.probe_every=0")
    if recipe.model.device == "cpu":
        raise LLDSError(
            "engine=verl trains on GPUs, but model.device is cpu: set model.device=cuda, or take engine=trl."
        )
    if recipe.scale.gpus * recipe.scale.nodes % recipe.scale.tensor_parallel:
        raise LLDSError(
            f"scale.tensor_parallel = {recipe.scale.tensor_parallel} does not divide the "
            f"{recipe.scale.nodes * recipe.scale.gpus} GPUs of scale.nodes × scale.gpus; change it."
        )


def _refuse(key: str, value: object, advice: str) -> None:
    raise LLDSError(f"engine=verl has no {key}={value}; {advice}, or train with engine=trl.")


def _data(recipe: Recipe, files: Files) -> dict[str, Any]:
    return {
        "data.train_files": str(files.train),
        "data.val_files": str(files.test),
        "data.train_batch_size": recipe.grpo.questions,
        "data.max_prompt_length": recipe.episode.max_prompt,
        "data.max_response_length": recipe.episode.max_response,
        "data.truncation": "error",
        "data.seed": recipe.run.seed,
        "data.return_raw_chat": True,
    }


def _model(recipe: Recipe, files: Files) -> dict[str, Any]:
    offload = recipe.scale.offload
    half = recipe.model.dtype == "bfloat16"
    precision = "bf16" if half else "fp32"
    return {
        "actor_rollout_ref.model.path": files.model,
        "actor_rollout_ref.model.use_remove_padding": half,
        "actor_rollout_ref.model.enable_gradient_checkpointing": recipe.model.gradient_checkpointing,
        f"{_ACTOR}.strategy": "fsdp2",
        f"{_ACTOR}.fsdp_config.param_offload": offload,
        f"{_ACTOR}.fsdp_config.optimizer_offload": offload,
        f"{_ACTOR}.fsdp_config.seed": recipe.run.seed,
        f"+{_ACTOR}.fsdp_config.mixed_precision": {
            "param_dtype": precision,
            "reduce_dtype": "fp32",
            "buffer_dtype": "fp32",
        },
        f"{_REF}.fsdp_config.param_offload": offload,
    }


def _generation(recipe: Recipe, files: Files) -> dict[str, Any]:
    scale, sampling = recipe.scale, recipe.sampling
    return {
        f"{_ROLLOUT}.name": scale.generator,
        f"{_ROLLOUT}.n": recipe.grpo.responses,
        f"{_ROLLOUT}.temperature": sampling.temperature,
        f"{_ROLLOUT}.top_p": sampling.top_p,
        f"{_ROLLOUT}.top_k": sampling.top_k or -1,
        f"{_ROLLOUT}.seed": recipe.run.seed,
        f"{_ROLLOUT}.dtype": recipe.model.dtype,
        f"{_ROLLOUT}.tensor_model_parallel_size": scale.tensor_parallel,
        f"{_ROLLOUT}.gpu_memory_utilization": scale.generator_memory,
        f"{_ROLLOUT}.max_model_len": recipe.episode.max_prompt + recipe.episode.max_response,
        f"{_ROLLOUT}.agent.num_workers": scale.agents,
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": recipe.grpo.micro_batch,
        f"{_REF}.log_prob_micro_batch_size_per_gpu": recipe.grpo.micro_batch,
    }


def _objective(recipe: Recipe) -> dict[str, Any]:
    grpo = recipe.grpo
    high = grpo.clip_low if grpo.clip_high is None else grpo.clip_high
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": grpo.scale_rewards == "group",
        "algorithm.use_kl_in_reward": False,
        f"{_ACTOR}.clip_ratio": grpo.clip_low,
        f"{_ACTOR}.clip_ratio_low": grpo.clip_low,
        f"{_ACTOR}.clip_ratio_high": high,
        f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean" if _is_gspo(recipe) else _LOSSES[grpo.loss][1],
        f"{_ACTOR}.use_kl_loss": grpo.beta > 0,
        f"{_ACTOR}.kl_loss_coef": grpo.beta,
        f"{_ACTOR}.kl_loss_type": "low_var_kl",
        f"{_ACTOR}.entropy_coeff": 0,
        f"{_ACTOR}.calculate_entropy": True,
    }


def _optimizer(recipe: Recipe) -> dict[str, Any]:
    grpo, tokens = recipe.grpo, recipe.scale.tokens_per_gpu
    return {
        f"{_ACTOR}.ppo_mini_batch_size": mini_batch(recipe),
        f"{_ACTOR}.ppo_epochs": grpo.passes,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": grpo.micro_batch,
        f"{_ACTOR}.use_dynamic_bsz": tokens > 0,
        f"{_ACTOR}.ppo_max_token_len_per_gpu": tokens or 16384,
        f"{_ACTOR}.data_loader_seed": recipe.run.seed,
        f"{_ACTOR}.grad_clip": grpo.max_grad_norm or 1e9,
        f"{_ACTOR}.optim.lr": grpo.learning_rate,
        f"{_ACTOR}.optim.lr_warmup_steps_ratio": grpo.warmup,
        f"{_ACTOR}.optim.lr_scheduler_type": grpo.schedule,
        f"{_ACTOR}.optim.weight_decay": grpo.weight_decay,
    }


def _episodes(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of the search episodes, which have the names of a recipe."""
    episode, retrieval = recipe.episode, recipe.retrieval
    is_file = retrieval.corpus != EMBEDDED
    options = {
        **{name: getattr(episode, name) for name in _EPISODE},
        **{name: getattr(retrieval, name) for name in _RETRIEVAL},
        # A worker may have another working folder.
        "corpus": str(Path(retrieval.corpus).resolve()) if is_file else retrieval.corpus,
        "token_file": retrieval.token_file and str(Path(retrieval.token_file).resolve()),
    }
    return {f"llds_search.{name}": value for name, value in options.items()}


def _rewards(recipe: Recipe) -> dict[str, Any]:
    reward = recipe.reward
    return {
        "+reward.custom_reward_function.reward_kwargs": {
            "exact_match": reward.exact_match,
            "f1": reward.f1,
            "valid_format": reward.valid_format,
        },
    }


def _trainer(recipe: Recipe, files: Files) -> dict[str, Any]:
    run, every = recipe.run, recipe.evaluation.every
    return {
        "trainer.nnodes": recipe.scale.nodes,
        "trainer.n_gpus_per_node": recipe.scale.gpus,
        "trainer.total_training_steps": run.rollouts,
        "trainer.total_epochs": run.rollouts,
        "trainer.project_name": "llds",
        "trainer.experiment_name": run.name,
        "trainer.logger": ["console", "file", *run.report_to],
        "trainer.default_local_dir": str(files.checkpoints),
        "trainer.resume_mode": "auto",
        "trainer.save_freq": run.save_every or run.rollouts,
        "trainer.max_actor_ckpt_to_keep": run.keep,
        "trainer.val_before_train": True,
        "trainer.test_freq": every or run.rollouts,
    }


def _llds(recipe: Recipe) -> list[str]:
    """Return the options of the regulariser, which the group ``llds`` has brought in."""
    llds = recipe.llds
    base = "gspo" if _is_gspo(recipe) else _LOSSES[recipe.grpo.loss][0]
    options = {
        "base": base,
        "coef": llds.coef,
        "gate": llds.gate,
        "normalizer": llds.normalizer,
        "baseline": llds.baseline,
        "preserve": llds.preserve,
        "dead_zone": llds.dead_zone,
        "penalty": llds.penalty,
        "huber_width": llds.huber_width,
        "answer_weight": "auto" if llds.mask_answer else None,
        "answer_searches": llds.answer_searches,
        "lld_epsilon": recipe.dynamics.lld_epsilon,
    }
    return [f"{_ACTOR}.policy_loss.llds_{name}={_written(value)}" for name, value in options.items()]


def _is_gspo(recipe: Recipe) -> bool:
    return recipe.grpo.importance == "sequence"


def _written(value: Any) -> str:
    """Return a value as Hydra reads it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(one) for one in value) + "]"
    if isinstance(value, str) and _NEEDS_QUOTES.search(value):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)
