"""What a loss in verl is not given of its batch: the reference's log-probs, and where answers lie.

verl hands a policy loss five tensors. The rest of the micro-batch is known to its caller, verl's ``ppo_loss``,
so that function is wrapped to put the micro-batch aside for the time of the call. That is done only where a
setting needs it (``llds_baseline=reference``, ``llds_answer_weight``).

An agent loop tells of answers in the ``extra_fields`` of its ``AgentLoopOutput``: :data:`ANSWER_SPAN` and
:data:`VALID_SEARCHES`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from llds.errors import LLDSError

#: Key in ``extra_fields``: (start, end) of the final answer among the tokens of the response, end exclusive;
#: None without an answer.
ANSWER_SPAN = "llds_answer_span"
#: Key in ``extra_fields``: number of valid searches of the trajectory.
VALID_SEARCHES = "llds_valid_searches"

_current: ContextVar[Any] = ContextVar("llds_verl_batch", default=None)


def expose_batches() -> None:
    """Wrap verl's ``ppo_loss`` wherever it was imported to; once is enough, more do no harm."""
    from verl.workers.utils import losses

    original = losses.ppo_loss
    if getattr(original, "llds_exposes", False):
        return
    exposing = _exposing(original)
    for name, module in list(sys.modules.items()):
        if name.startswith("verl.") and vars(module).get("ppo_loss") is original:
            module.ppo_loss = exposing  # type: ignore[attr-defined]


def _exposing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        token = _current.set(data)
        try:
            return original(config, model_output, data, dp_group)
        finally:
            _current.reset(token)

    ppo_loss.llds_exposes = True  # type: ignore[attr-defined]
    return ppo_loss


def reference_logprobs(like: Tensor) -> Tensor:
    """Return the reference's log-probs in nats, padded as ``like`` [B, T].

    Raises ``LLDSError`` where the batch has none.
    """
    data = _batch("llds_baseline=reference")
    if "ref_log_prob" not in data:
        raise LLDSError(
            "llds_baseline=reference needs the reference's log-probs, which verl computes with "
            "actor_rollout_ref.actor.use_kl_loss=True only (kl_loss_coef may be 0)."
        )
    values = data["ref_log_prob"]
    padded: Tensor = values.to_padded_tensor(0.0, output_size=like.shape) if values.is_nested else values
    return padded


def answers(response_mask: Tensor) -> tuple[Tensor, list[int]]:
    """Return the answer mask, bool of the shape of ``response_mask`` [B, T], and the valid searches of each
    response that says how many it has. Rows without a policy token, as verl pads batches with, don't count.

    Raises ``LLDSError`` where no response of the micro-batch says anything.
    """
    data = _batch("llds_answer_weight")
    spans = _per_response(data, ANSWER_SPAN)
    searches = _per_response(data, VALID_SEARCHES)
    if spans is None or searches is None:
        raise LLDSError(
            f"llds_answer_weight needs {ANSWER_SPAN} and {VALID_SEARCHES} in the extra_fields of the agent "
            "loop's output, as the agent loop of llds.engines.verl writes them; use that, or unset it."
        )
    starts, ends = torch.tensor([_span(one) for one in spans], device=response_mask.device).T
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    mask = (positions >= starts[:, None]) & (positions < ends[:, None])
    real = response_mask.any(1).tolist()
    told = [int(one) for one, is_real in zip(searches, real, strict=True) if is_real and one is not None]
    return mask, told


def _batch(setting: str) -> Any:
    data = _current.get()
    if data is None:
        raise LLDSError(
            f"{setting} needs the whole micro-batch, but this trainer calls the policy loss by another way "
            "than verl's ppo_loss; unset it."
        )
    return data


def _per_response(data: Any, key: str) -> Sequence[Any] | None:
    """Return one value per response: from a field of its own (V0), or from ``extra_fields`` (V1)."""
    if key in data:
        return _listed(data[key])
    if "extra_fields" not in data:
        return None
    found = [one.get(key) if isinstance(one, dict) else None for one in _listed(data["extra_fields"])]
    is_told = any(isinstance(one, dict) and key in one for one in _listed(data["extra_fields"]))
    return found if is_told else None


def _listed(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _span(value: Any) -> tuple[int, int]:
    if value is None:
        return 0, 0
    start, end = value
    return int(start), int(end)
