"""λ over time: warm-up, and control by what was measured. Pure functions; the trainer holds λ.

A converter between normalisers is :func:`llds.objective.convert_coef`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llds.errors import LLDSError
from llds.objective.checks import check_above, check_least


def warmup_coef(coef: float, step: int, warmup_steps: int) -> float:
    """Return λ in the optimizer step after ``step`` others: it rises linearly to ``coef`` over
    ``warmup_steps``.

    With ``warmup_steps`` 0 it is ``coef`` from the start. Raises ``LLDSError`` for a negative number.
    """
    check_least(0, coef=coef, step=step, warmup_steps=warmup_steps)
    return coef * min(1.0, (step + 1) / warmup_steps) if warmup_steps else coef


@dataclass(frozen=True)
class CoefControl:
    """Settings of the control of λ by displacement.

    ``target``: displacement of correct responses to allow, nats/token. ``width``: a displacement this far off
    changes λ at the full rate, one in between in proportion. ``rate``: by which factor at most in one
    optimizer step, above 1. ``lower``, ``upper``: bounds of λ; the lower one is above 0, for λ moves by
    factors.
    """

    target: float = 0.0
    width: float = 2e-3
    rate: float = 1.05
    lower: float = 0.01
    upper: float = 2.0

    def __post_init__(self) -> None:
        check_above(0.0, width=self.width, lower=self.lower)
        check_above(1.0, rate=self.rate)
        check_least(self.lower, upper=self.upper)
        if not math.isfinite(self.target):
            raise LLDSError(f"target must be a finite number of nats per token, but is {self.target}.")


def controlled_coef(coef: float, displacement: float | None, control: CoefControl) -> float:
    """Return λ for the next optimizer step: up when correct responses lost likelihood, down when they did
    not.

    ``displacement``: ``displacement_correct`` of this step in nats/token; pass None in a step with old ==
    new, where it is 0 by construction. None and NaN leave λ as it is, within the bounds. Beyond the paper.
    """
    coef = min(control.upper, max(control.lower, coef))
    if displacement is None or math.isnan(displacement):
        return coef
    push = max(-1.0, min(1.0, (displacement - control.target) / control.width))
    return min(control.upper, max(control.lower, coef * math.exp(push * math.log(control.rate))))
