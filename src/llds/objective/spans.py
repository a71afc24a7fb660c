"""Actions and responses as index vectors, and sums over them, without a data-dependent shape.

Everything here works on one flat axis of N tokens, so a padded [B, T] batch and a packed row are the same
case. A group index is a long tensor [N]: 0 says "in no group", groups count from 1. There are at most N
groups, so N + 1 slots always suffice and no tensor's shape depends on what a mask holds.
"""

import torch
from torch import Tensor


def row_starts(shape: torch.Size, device: torch.device) -> Tensor:
    """Mark the first token of every row of a tensor of ``shape``: flat bool [N]."""
    starts = torch.zeros(shape, dtype=torch.bool, device=device)
    starts[..., :1].fill_(True)
    return starts.flatten()


def segment_starts(segment_ids: Tensor) -> Tensor:
    """Mark the tokens of packed rows [..., N] whose segment id is not the previous one's: flat bool [N]."""
    first = torch.ones_like(segment_ids[..., :1], dtype=torch.bool)
    changed = segment_ids[..., 1:] != segment_ids[..., :-1]
    return torch.cat([first, changed], dim=-1).flatten()


def segment_ids_from_cu_seqlens(cu_seqlens: Tensor, length: int) -> Tensor:
    """Turn cumulative lengths [S + 1], as varlen attention takes them, into segment ids: long [length].

    Token i belongs to segment s when ``cu_seqlens[s] <= i < cu_seqlens[s + 1]``. Tokens past the last bound
    are padding and get the id S.
    """
    positions = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


def response_ids(mask: Tensor, starts: Tensor) -> Tensor:
    """Number the responses, which begin at ``starts``: long [N], 0 where ``mask`` is off (both bool [N])."""
    return starts.cumsum(0).masked_fill(~mask, 0)


def action_ids(mask: Tensor, starts: Tensor) -> Tensor:
    """Number the actions, the runs of ``mask`` within one response: long [N], 0 where ``mask`` is off."""
    before = torch.cat([mask.new_zeros(1), mask[:-1]])[: mask.numel()]
    return (mask & (starts | ~before)).cumsum(0).masked_fill(~mask, 0)


def group_sums(values: Tensor, ids: Tensor) -> Tensor:
    """Sum ``values`` [N] over each group: [N + 1], slot g for group g; slot 0 is what lies in no group."""
    return values.new_zeros(values.numel() + 1).scatter_add(0, ids, values)


def spread(per_group: Tensor, ids: Tensor) -> Tensor:
    """Give every token the value of its group: from [N + 1] to [N]."""
    return per_group.gather(0, ids)


def count_groups(ids: Tensor, tokens: Tensor) -> Tensor:
    """Count the groups with at least one of ``tokens`` (bool [N]): 0-dim long."""
    return (group_sums(tokens.long(), ids)[1:] > 0).sum()


def group_max(values: Tensor, ids: Tensor) -> Tensor:
    """Return the largest of ``values`` [N] in each group: [N + 1]; −inf without any, NaN if one is NaN."""
    empty = values.new_full((values.numel() + 1,), -torch.inf)
    return empty.scatter_reduce(0, ids, values, "amax")
