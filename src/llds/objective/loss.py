"""The LLDS regulariser (arXiv 2512.04220): a penalty on actions of good responses that became less likely."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llds.errors import LLDSError
from llds.objective import spans
from llds.objective.normalizers import count_of, metric_of

Gate = Literal["action", "response", "token"]
Preserve = Literal["nonnegative", "positive"]
Penalty = Literal["relu", "huber"]


class LLDSOutput(NamedTuple):
    """A loss and what was measured on the way.

    ``loss`` is 0-dim and already multiplied by the coefficient. ``metrics`` maps names to 0-dim detached tensors.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def llds_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    coef: float | Tensor = 0.2,
    gate: str = "action",
    normalizer: str = "all",
    answer_mask: Tensor | None = None,
    answer_weight: float | Tensor = 1.0,
    token_count: int | Tensor | None = None,
    preserve: str = "nonnegative",
    advantage_tol: float = 1e-3,
    dead_zone: float | Tensor = 0.0,
    penalty: str = "relu",
    huber_width: float = 0.1,
    segment_ids: Tensor | None = None,
    compat: str | None = None,
) -> LLDSOutput:
    """Penalise the likelihood that actions of preserved responses lost: λ · Σ gate · w · max(0, d) / N."""
    metric_of(normalizer)
    shape = logprobs.shape
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    mask = response_mask.bool().flatten()
    starts = spans.row_starts(shape, logprobs.device) if segment_ids is None else spans.segment_starts(segment_ids)
    if advantages.shape != shape:
        advantages = (
            advantages.reshape(-1, 1).expand(shape)
            if segment_ids is None
            else advantages[torch.where(response_mask.bool(), segment_ids, 0)]
        )
    zero = torch.zeros((), dtype=dtype, device=logprobs.device)
    new = torch.where(mask, logprobs.flatten().to(dtype), zero)
    old = torch.where(mask, old_logprobs.detach().flatten().to(dtype), zero)
    adv = torch.where(mask, advantages.flatten().to(dtype), zero)
    drop = old - new
    tol = 0.0 if compat == "authors" else advantage_tol
    keep = mask & (adv > tol if preserve == "positive" else adv >= -tol)
    finite = drop.isfinite() & adv.isfinite()
    runs = keep if compat == "authors" else mask
    actions, responses = spans.action_ids(runs, starts), spans.response_ids(runs, starts)
    with torch.no_grad():
        if gate == "token":
            opened = keep
        else:
            ids = {"action": actions, "response": responses}[gate]
            opened = keep & (spans.spread(spans.group_sums(drop - dead_zone, ids), ids) > 0)
    excess = drop - dead_zone
    size = excess.clamp(min=0)
    if penalty == "huber":
        size = torch.where(size < huber_width, size.square() / (2 * huber_width), size - huber_width / 2)
    weight = zero + 1 if answer_mask is None else torch.where(answer_mask.bool().flatten(), answer_weight, zero + 1)
    cost = torch.where(opened, weight * size, zero) + drop * torch.where(finite, zero, float("nan"))
    total = cost.sum()
    with torch.no_grad():
        metrics = {
            "penalty_sum": total.detach(),
            "tokens": mask.sum(),
            "responses": spans.count_groups(responses, mask),
            "preserved_tokens": keep.sum(),
            "gated_tokens": opened.sum(),
            "penalised_tokens": (opened & (excess > 0)).sum(),
            "actions_preserved": spans.count_groups(actions, keep),
            "actions_open": spans.count_groups(actions, opened),
            "nonfinite_tokens": (~finite).sum(),
        }
    count = count_of(normalizer, metrics) if token_count is None else token_count
    if compat not in (None, "authors"):
        raise LLDSError(f"compat must be None or 'authors', but is {compat!r}.")
    return LLDSOutput(coef * total / count, metrics)
