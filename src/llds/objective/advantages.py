"""Group-relative advantages: how much better a response did than its siblings for the same question."""

import torch
from torch import Tensor

from llds.errors import LLDSError
from llds.objective import spans
from llds.objective.checks import check_choice, check_least, check_shape

#: Rewards of a group that lie within so many rounding errors of each other are equal.
ROUNDING_ERRORS = 8


def grpo_advantages(
    rewards: Tensor,
    group_size: int | None = None,
    *,
    groups: Tensor | None = None,
    scale: str = "std",
    eps: float = 1e-4,
    valid: Tensor | None = None,
) -> Tensor:
    """Return A = (r − mean) / (std + eps) within each group, or r − mean with ``scale="none"``: [B].

    A group of equal rewards gets exactly 0. The plain formula leaves a rounding error there, which the
    division by eps blows up, and whose sign would decide whether a response is preserved.

    Args:
        rewards: [B], any real dtype; float64 is computed in float64, everything else in float32.
        group_size: G, if every G rows in turn are a group.
        groups: otherwise integers [B]; rows with the same number are a group, in whatever order.
        scale: "std" (of the sample, over G − 1, as in TRL and verl) or "none" (Dr. GRPO).
        eps: added to the standard deviation; 1e-4 is TRL's, verl has 1e-6.
        valid: bool [B]. A row that is off, say of an episode whose tool failed, has no part in its group and
            gets 0. Take it out of the response mask as well, for a response with A = 0 is preserved.

    Raises:
        LLDSError: a shape, a name or a number is wrong, or not exactly one of ``group_size`` and ``groups``
            is given.
    """
    check_choice(("std", "none"), scale=scale)
    check_least(0.0, eps=eps)
    ids = _group_ids(rewards, group_size, groups)
    on = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid.bool()
    check_shape("rewards", rewards.shape, valid=on)
    ids = ids.masked_fill(~on, 0)
    reward = rewards.to(torch.promote_types(rewards.dtype, torch.float32))

    def of_group(per_group: Tensor) -> Tensor:
        return spans.spread(per_group, ids)

    size = spans.group_sums(torch.ones_like(reward), ids)
    centred = reward - of_group(spans.group_sums(reward, ids) / size)
    top, bottom = spans.group_max(reward, ids), -spans.group_max(-reward, ids)
    rounding = ROUNDING_ERRORS * torch.finfo(reward.dtype).eps * torch.maximum(top.abs(), bottom.abs())
    equal = of_group(top - bottom <= rounding)
    variance = spans.group_sums(centred.square(), ids) / (size - 1).clamp(min=1)
    advantage = centred if scale == "none" else centred / (of_group(variance.sqrt()) + eps)
    return advantage.masked_fill(equal | ~on, 0)


def _group_ids(rewards: Tensor, group_size: int | None, groups: Tensor | None) -> Tensor:
    """Number the groups from 1: long [B]."""
    if rewards.dim() != 1:
        raise LLDSError(f"rewards must be one per response, [B], but has shape {list(rewards.shape)}.")
    if groups is not None and group_size is None:
        check_shape("rewards", rewards.shape, groups=groups)
        order = groups.argsort()
        sorted_ids = spans.segment_starts(groups[order]).cumsum(0)
        return torch.zeros_like(sorted_ids).scatter(0, order, sorted_ids)
    if group_size is None or groups is not None:
        raise LLDSError("grpo_advantages needs exactly one of group_size and groups.")
    check_least(1, group_size=group_size)
    if len(rewards) % group_size:
        raise LLDSError(f"{len(rewards)} rewards cannot be split into groups of {group_size}.")
    return torch.arange(len(rewards), device=rewards.device) // group_size + 1
