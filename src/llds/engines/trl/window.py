"""One optimizer step, one record: sums over micro-batches and processes, reduced once, then the ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from llds.engines.trl.checks import STRUCTURAL_METRIC
from llds.engines.trl.rollout import sum_dtype
from llds.objective.metrics import RATIOS

Verdict = Literal["structural zero", "measured zero", "active"]

#: Logged name -> ratio of additive metrics. Correct, neutral and wrong go by the sign of the advantage.
LOGGED_RATIOS: Mapping[str, tuple[str, str]] = {
    "llds/gate_rate": RATIOS["gate_rate"],
    "llds/preserved_share": RATIOS["preserved_share"],
    "llds/penalised_share": RATIOS["penalised_share"],
    "llds/moved_share": RATIOS["moved_share"],
    "llds/displacement_correct": RATIOS["displacement_positive"],
    "llds/displacement_neutral": RATIOS["displacement_zero"],
    "llds/displacement_wrong": RATIOS["displacement_negative"],
    "llds/logprob_correct": RATIOS["logprob_positive"],
    "llds/logprob_neutral": RATIOS["logprob_zero"],
    "llds/logprob_wrong": RATIOS["logprob_negative"],
    "llds/noise_floor": ("fresh_abs_sum", "fresh_tokens"),
}


@dataclass(frozen=True)
class StepRecord:
    """What LLDS did in one optimizer step, the same on every process.

    ``step``: optimizer steps done before it. ``metrics``: the logged values; a conditional mean over nothing
    is left out. Displacement and log-probs are nats per token, displacement positive where tokens became less
    likely. ``sums``: the additive metrics of :func:`llds.llds_loss` over the whole optimizer batch.
    ``verdict``: a zero that had to be ("structural zero"), one that was found ("measured zero"), or "active".
    """

    step: int
    metrics: dict[str, float]
    sums: dict[str, float]
    verdict: Verdict


class Window:
    """Adds up the additive metrics of the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one micro-batch: name to 0-dim tensor, the same names on every process and every time."""
        self.micro_batches += 1
        for name, value in values.items():
            value = value.detach().to(sum_dtype(value.device))
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def reduce(self, accelerator: Any) -> dict[str, float]:
        """Return the sums over all processes. Collective; the one wait for the device per optimizer step."""
        names = sorted(self._sums)
        totals = accelerator.reduce(torch.stack([self._sums[name] for name in names]), "sum").tolist()
        return dict(zip(names, totals, strict=True))


def make_record(step: int, coef: float, sums: dict[str, float], processes: int) -> StepRecord:
    """Turn the sums of an optimizer step into its record."""
    structural = sums["structural_batches"] == sums["batches"]
    # Every process adds its loss times the number of processes, for gradients are averaged over them.
    metrics = {
        "llds/coef": coef,
        "llds/loss": sums["loss"] / processes,
        STRUCTURAL_METRIC: float(structural),
        "llds/nonfinite_tokens": sums["nonfinite_tokens"],
    }
    for name, (numerator, denominator) in LOGGED_RATIOS.items():
        if sums[denominator] > 0:
            metrics[name] = sums[numerator] / sums[denominator]
    acted = sums["penalised_tokens"] > 0 or math.isnan(sums["penalty_sum"])
    verdict: Verdict = "structural zero" if structural else "active" if acted else "measured zero"
    return StepRecord(step, metrics, sums, verdict)
