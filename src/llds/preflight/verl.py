"""What a verl configuration says about LLDS; reads plain mappings, verl itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from llds.errors import LLDSError
from llds.preflight.setup import Setup

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
NAMES = {
    "steps_per_rollout": f"data.train_batch_size, {_ACTOR}.ppo_mini_batch_size, {_ACTOR}.ppo_epochs",
    "coef": f"{_ACTOR}.policy_loss.llds_coef",
    "gate": f"{_ACTOR}.policy_loss.llds_gate",
    "normalizer": f"{_ACTOR}.policy_loss.llds_normalizer",
    "baseline": f"{_ACTOR}.policy_loss.llds_baseline",
    "preserve": f"{_ACTOR}.policy_loss.llds_preserve",
    "advantage_tol": f"{_ACTOR}.policy_loss.llds_advantage_tol",
    "answer_weight": f"{_ACTOR}.policy_loss.llds_answer_weight",
    "group_size": "actor_rollout_ref.rollout.n",
    "kl_in_loss": f"{_ACTOR}.use_kl_loss, {_ACTOR}.kl_loss_coef",
    "kl_in_reward": "algorithm.use_kl_in_reward, algorithm.kl_ctrl.kl_coef",
    "advantages": "algorithm.adv_estimator",
    "has_inference_logprobs": "actor_rollout_ref.rollout.calculate_log_probs",
    "old_from_inference": "algorithm.rollout_correction.bypass_mode",
    "masks_feedback": f"{_ACTOR}.state_masking",
    "is_attached": f"{_ACTOR}.policy_loss.loss_mode, algorithm.rollout_correction.bypass_mode, trainer.use_v1",
    "attach_advice": (
        "add +llds@_global_=default (or set loss_mode=llds; see docs/verl.md); bypass_mode with trainer.use_v1=False "
        "replaces whatever is set, unless llds_wrap_registry is"
    ),
}


def with_overrides(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a configuration with ``key=value`` words of a verl command laid over it (``+`` and ``++`` too).

    Raises :class:`LLDSError` for a word without ``=`` and for a value that is no YAML.
    """
    import yaml

    result: dict[str, Any] = _copied(config)
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals:
            raise LLDSError(f"'{word}' is no setting; write key=value, such as data.train_batch_size=512.")
        # What follows an @ says where hydra puts a group, not what it is.
        *path, last = key.lstrip("+").partition("@")[0].split(".")
        place = result
        for name in path:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            place = place[name]
        try:
            place[last] = yaml.safe_load(value)
        except (yaml.YAMLError, RecursionError):
            raise LLDSError(f"The value in '{word}' is neither a text, a number nor a list.") from None
    return result


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in config.items()}


def is_verl(config: Mapping[str, Any]) -> bool:
    """Say whether a configuration is one of verl's."""
    return "actor_rollout_ref" in config


def setup_of_verl(config: Mapping[str, Any]) -> Setup:
    """Return what a verl configuration says; a value that is a reference (``${…}``) counts as not said."""
    loss = _mapping(config, "actor_rollout_ref.actor.policy_loss")
    mode = str(loss.get("loss_mode", "vanilla"))
    llds = {key.removeprefix("llds_"): value for key, value in loss.items() if key.startswith("llds_")}
    # On a command line the group stands for itself: +llds=default. Hydra puts what is in it in its place.
    has_group = isinstance(config.get("llds"), str)
    is_named = has_group or "llds" in mode or bool(loss.get("llds_wrap_registry"))
    wanted = is_named or bool(llds)
    bypass = bool(_get(config, "algorithm.rollout_correction.bypass_mode") or False)
    # The older trainer then puts a loss of its own in place of the one that is named.
    is_replaced = bypass and _get(config, "trainer.use_v1") is False and not loss.get("llds_wrap_registry")
    return Setup(
        engine="verl",
        is_attached=(is_named and not is_replaced) if wanted else None,
        coef=_number(llds.get("coef", 0.2)) if wanted else None,
        gate=str(llds.get("gate", "action")) if wanted else None,
        normalizer=_normalizer(llds) if wanted else None,
        baseline=_baseline(llds, bypass) if wanted else None,
        preserve=str(llds.get("preserve", "nonnegative")) if wanted else None,
        advantage_tol=_number(llds.get("advantage_tol", 1e-3)) if wanted else None,
        answer_weight=llds.get("answer_weight"),
        steps_per_rollout=_steps(config),
        group_size=_whole(_get(config, f"{_ROLLOUT}.n_agent")) or _whole(_get(config, f"{_ROLLOUT}.n")),
        advantages=_text(_get(config, "algorithm.adv_estimator")),
        kl_in_loss=_switched(config, f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef", 0.001),
        kl_in_reward=_switched(config, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", 0.001),
        old_from_inference=bypass,
        has_inference_logprobs=_get(config, f"{_ROLLOUT}.calculate_log_probs"),
        masks_feedback=_masks(config),
        is_multi_turn=_has_tools(config),
        names=NAMES,
        live_advice=(
            "set actor.ppo_mini_batch_size to half of data.train_batch_size or less, or actor.ppo_epochs=2, or "
            "llds_baseline=reference with actor.use_kl_loss=True"
        ),
    )


def _normalizer(llds: Mapping[str, Any]) -> str:
    """The authors' count is that of all tokens too, of each micro-batch."""
    name = str(llds.get("normalizer", "all"))
    return "all" if name == "authors" else name


def _baseline(llds: Mapping[str, Any], bypass: bool) -> str:
    """In bypass mode the old log-probs are the inference engine's, so they differ at once."""
    name = str(llds.get("baseline", "old"))
    return "inference" if bypass and name == "old" else name


def _steps(config: Mapping[str, Any]) -> Fraction | None:
    """Return optimizer steps per rollout. Search-R1 counts a mini-batch in responses, verl in questions."""
    batch = _whole(_get(config, "data.train_batch_size"))
    batch = batch and batch * (_whole(_get(config, f"{_ROLLOUT}.n_agent")) or 1)
    mini = _whole(_get(config, f"{_ACTOR}.ppo_mini_batch_size"))
    epochs = _whole(_get(config, f"{_ACTOR}.ppo_epochs")) or 1
    return Fraction(batch * epochs, mini) if batch and mini else None


def _has_tools(config: Mapping[str, Any]) -> bool:
    names = ("actor_rollout_ref.rollout.multi_turn.enable", "do_search")
    return any(bool(_get(config, name)) for name in names) or _get(config, "retriever.url") is not None


def _masks(config: Mapping[str, Any]) -> bool:
    """verl's agent loops mask what tools wrote; Search-R1's fork does where it is told to."""
    fork = _get(config, f"{_ACTOR}.state_masking")
    is_fork = _get(config, "do_search") is not None or _get(config, "retriever.url") is not None
    return bool(fork) if fork is not None or is_fork else True


def _switched(config: Mapping[str, Any], switch: str, weight: str, default: float) -> float:
    if not _get(config, switch):
        return 0.0
    value = _number(_get(config, weight))
    return default if value is None else value


def _get(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return None if isinstance(value, str) and "${" in value else value


def _mapping(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    value = _get(config, path)
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    """Return a number, also one such as 1e-3, which YAML takes for text without a point in it."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
