"""The answer weight of LLDS-MA (Eq. 5): hold the final answer loosely while the model hardly searches.

A model that has collapsed to a single search call would be kept there, were its answer held as firmly as its
searches.
"""

import torch
from torch import Tensor

from llds.objective.checks import check_above


def answer_weight_from_searches(valid_searches: Tensor, target: float = 2.0) -> Tensor:
    """Return β = min(V / V_B, 1), 0-dim, for ``llds_loss(answer_weight=...)``.

    ``valid_searches``: the number of valid searches of every trajectory of the step, any shape and dtype; V
    is their mean (or pass V itself, 0-dim). ``target``: V_B, the number from which the answer counts in full.
    """
    check_above(0.0, target=target)
    return (_mean(valid_searches) / target).clamp(max=1.0)


def authors_answer_weight(valid_searches: Tensor, coef: float, mask_weight: float) -> Tensor:
    """Return what the authors' code has in place of Eq. 5: min(mask_weight · max(V − 1, 0), λ) / λ, 0-dim.

    There answer tokens have a coefficient of their own, at most λ = ``coef``; divided by λ it is the weight
    that ``llds_loss`` takes.
    """
    check_above(0.0, coef=coef)
    return (mask_weight * (_mean(valid_searches) - 1).clamp(min=0)).clamp(max=coef) / coef


def _mean(counts: Tensor) -> Tensor:
    return counts.to(torch.promote_types(counts.dtype, torch.float32)).mean()
