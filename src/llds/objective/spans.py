"""Actions and responses as index vectors, and sums over them, without a data-dependent shape.

Everything here works on one flat axis of N tokens, so a padded [B, T] batch and a packed row are the same case.
A group index is a long tensor [N]: 0 says "in no group", groups count from 1. At most N groups exist, so N + 1
slots always suffice and no tensor's shape depends on what the masks hold.
"""

import torch
from torch import Tensor


def row_starts(shape: torch.Size | tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Mark the first token of every row of a tensor of ``shape``, flattened: bool [N]."""
    starts = torch.zeros(shape, dtype=torch.bool, device=device)
    starts[..., :1] = True
    return starts.flatten()


def segment_starts(segment_ids: Tensor) -> Tensor:
    """Mark each token of packed rows [..., N] whose segment id differs from the one before: flat bool [N]."""
    starts = row_starts(segment_ids.shape, segment_ids.device).view(segment_ids.shape)
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    return torch.cat([starts[..., :1], changes], dim=-1).flatten()


def segment_ids_from_cu_seqlens(cu_seqlens: Tensor, length: int) -> Tensor:
    """Turn cumulative lengths [S + 1], as varlen attention takes them, into segment ids [length].

    Token i belongs to segment s when ``cu_seqlens[s] <= i < cu_seqlens[s + 1]``; tokens past the last bound are
    padding and get the id S.
    """
    positions = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


def response_ids(mask: Tensor, starts: Tensor) -> Tensor:
    """Number the responses: long [N], 0 where ``mask`` (bool [N]) is off; ``starts`` marks their first tokens."""
    return torch.where(mask, starts.cumsum(0), 0)


def action_ids(mask: Tensor, starts: Tensor) -> Tensor:
    """Number the actions, the maximal runs of ``mask`` that cross no response boundary: long [N], 0 where off."""
    before = torch.cat([mask.new_zeros(1), mask])[: mask.numel()]
    first = mask & (starts | ~before)
    return torch.where(mask, first.cumsum(0), 0)


def group_sums(values: Tensor, ids: Tensor) -> Tensor:
    """Sum ``values`` [N] over each group: [N + 1], slot g for group g; slot 0 holds what is in no group."""
    return values.new_zeros(values.numel() + 1).scatter_add(0, ids, values)


def spread(per_group: Tensor, ids: Tensor) -> Tensor:
    """Give every token the value of its group: [N + 1] and [N] to [N]."""
    return per_group.gather(0, ids)


def count_groups(ids: Tensor, member: Tensor) -> Tensor:
    """Count the groups that have at least one token in ``member`` (bool [N]): 0-dim long."""
    return (group_sums(member.long(), ids)[1:] > 0).sum()
