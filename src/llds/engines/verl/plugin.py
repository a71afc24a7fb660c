"""The losses in verl's registry: ``llds``, ``llds_<base>``, and any entry with LLDS added in place.

Importing this module registers them. verl 0.9 does that in every process, through the entry point group
``verl.plugins``; older versions where the configuration is built (:mod:`llds.engines.verl.config`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn, register_policy_loss

from llds.engines.verl.options import LLDSOptions
from llds.engines.verl.state import LossState
from llds.errors import LLDSError

NAME = "llds"
DEFAULT_BASE = "vanilla"
#: The order of a policy loss's arguments in verl.
_ARGUMENTS = (
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
)

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Any]]]


def base_of(loss_mode: str, base: str | None = None) -> str:
    """Return the loss that a ``loss_mode`` of ours adds to.

    Raises ``LLDSError`` for a mode that is not ours, an unknown base, and two bases that differ.
    """
    named = None if loss_mode == NAME else loss_mode.removeprefix(f"{NAME}_")
    if named == loss_mode:
        raise LLDSError(f"loss_mode={loss_mode!r} is none of LLDS; set it to 'llds'.")
    if named and base and named != base:
        raise LLDSError(
            f"loss_mode={loss_mode!r} adds LLDS to {named!r}, but llds_base says {base!r}; keep one of them."
        )
    name = named or base or DEFAULT_BASE
    known = base_names()
    if name not in known:
        raise LLDSError(
            f"llds_base must be one of verl's policy losses, {', '.join(known)}, but is {name!r}; a loss of "
            "your own must be registered before: name its module in VERL_USE_EXTERNAL_MODULES."
        )
    return name


def base_names() -> list[str]:
    """Return the names in verl's registry that LLDS can be added to."""
    return sorted(name for name, fn in POLICY_LOSS_REGISTRY.items() if not _is_own(fn))


def register_losses() -> None:
    """Register ``llds`` and, for every loss that verl has by now, ``llds_<base>``."""
    register_policy_loss(NAME)(_named_loss(None))
    for name in base_names():
        register_policy_loss(f"{NAME}_{name}")(_named_loss(name))


def wrap_registry() -> None:
    """Add LLDS in place to every loss in verl's registry, for configurations with ``llds_wrap_registry``.

    Where the configuration of a call has it not, the loss stays what it was.
    """
    for name in base_names():
        if not hasattr(POLICY_LOSS_REGISTRY[name], "llds_base"):
            POLICY_LOSS_REGISTRY[name] = _wrapped(POLICY_LOSS_REGISTRY[name])


def _named_loss(base: str | None) -> PolicyLoss:
    """Return a loss that adds LLDS to ``base``, or to the one that its configuration names."""

    def llds_policy_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        batch = _by_name(args, kwargs)
        state = _state_of(batch.get("config"))
        found = get_policy_loss_fn(base or state.options.base or DEFAULT_BASE)
        # An entry that has LLDS in place must not count it twice.
        return _add(getattr(found, "llds_base", found), state, batch)

    llds_policy_loss.llds_named = True  # type: ignore[attr-defined]
    return llds_policy_loss


def _wrapped(original: PolicyLoss) -> PolicyLoss:
    @functools.wraps(original)
    def policy_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        batch = _by_name(args, kwargs)
        settings = getattr(batch.get("config"), "policy_loss", None)
        if settings is None or not settings.get("llds_wrap_registry", False):
            return original(*args, **kwargs)
        return _add(original, _state_of(batch["config"]), batch)

    policy_loss.llds_base = original  # type: ignore[attr-defined]
    return policy_loss


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}


def _is_own(fn: PolicyLoss) -> bool:
    return hasattr(fn, "llds_named")


def _add(base: PolicyLoss, state: LossState, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Call a loss as verl called us, and add the term and its metrics to what it returns."""
    loss, metrics = base(**batch)
    term, told = state.observe(
        batch["log_prob"],
        batch["old_log_prob"],
        batch["advantages"],
        batch["response_mask"],
        batch["config"],
    )
    return loss if state.options.coef == 0 else loss + term, {**metrics, **told}


#: By the identity of the actor's configuration, which verl keeps for as long as the actor lives.
_states: dict[int, LossState] = {}


def _state_of(config: Any) -> LossState:
    settings = getattr(config, "policy_loss", None)
    if settings is None:
        raise LLDSError(
            f"{NAME} is a loss for verl's actor, but was called without an actor configuration that has policy_loss."
        )
    key = id(config)
    if key not in _states:
        _states[key] = LossState(LLDSOptions.of(settings), settings.get("llds_run"))
        weakref.finalize(config, _states.pop, key, None)
    return _states[key]


register_losses()
