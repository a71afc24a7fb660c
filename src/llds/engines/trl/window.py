"""One optimizer step, one record: sums over micro-batches and processes, reduced once, then the means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from llds.dynamics import LOG_PREFIX, Measure, StepAccumulator, read_series
from llds.engines.trl.checks import STRUCTURAL_METRIC
from llds.engines.trl.rollout import sum_dtype
from llds.objective.metrics import RATIOS

Verdict = Literal["structural zero", "measured zero", "active"]

#: What the regulariser did: logged name -> ratio of additive metrics of :func:`llds.llds_loss`. They go by
#: its own baseline and preserving set; the other series are measured from the policy that sampled.
REGULARISER_RATIOS: Mapping[str, tuple[str, str]] = {
    "llds/gate_rate": RATIOS["gate_rate"],
    "llds/preserved_share": RATIOS["preserved_share"],
    "llds/penalised_share": RATIOS["penalised_share"],
    "llds/penalty": ("penalty_sum", "preserved_tokens"),
}


@dataclass(frozen=True)
class StepRecord:
    """What happened in one optimizer step, the same on every process.

    ``step``: optimizer steps done before it. ``metrics``: the logged values; a conditional mean over nothing
    is left out. ``series``: the series of :data:`llds.dynamics.SERIES` that are measured on batches, by name,
    None where there was nothing to measure. ``sums``: the additive metrics of :func:`llds.llds_loss` over
    the whole optimizer batch. ``verdict``: a zero that had to be ("structural zero"), one that was found
    ("measured zero"), or "active".
    """

    step: int
    metrics: dict[str, float]
    series: dict[str, float | None]
    sums: dict[str, float]
    verdict: Verdict


class Window:
    """Adds up what the micro-batches of one optimizer step have to say.

    ``dynamics``: the accumulator of their series.
    """

    def __init__(self, how: Measure, device: torch.device | str = "cpu") -> None:
        self.micro_batches = 0
        self.dynamics = StepAccumulator(how, device)
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one micro-batch: name to 0-dim tensor, the same names on every process and every time."""
        self.micro_batches += 1
        for name, value in values.items():
            value = value.detach().to(sum_dtype(value.device))
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def reduce(self, accelerator: Any) -> tuple[dict[str, float], dict[str, float | None]]:
        """Return the sums and the series over all processes. Collective; the one wait for the device per
        optimizer step.
        """
        names = sorted(self._sums)
        mine = torch.stack([self._sums[name] for name in names])
        totals = accelerator.reduce(torch.cat([mine, self.dynamics.sums().to(mine)]), "sum").tolist()
        return dict(zip(names, totals[: len(names)], strict=True)), read_series(totals[len(names) :])


def make_record(
    step: int, coef: float, sums: dict[str, float], series: dict[str, float | None], processes: int
) -> StepRecord:
    """Turn the sums of an optimizer step into its record."""
    structural = sums["structural_batches"] == sums["batches"]
    if sums["assumed_batches"]:
        # Without old log-probs the floor was not measured.
        series = {**series, "noise_floor": None}
    metrics = {LOG_PREFIX + name: value for name, value in series.items() if value is not None}
    # Every process adds its loss times the number of processes, for gradients are averaged over them.
    metrics |= {
        "llds/coef": coef,
        "llds/loss": sums["loss"] / processes,
        STRUCTURAL_METRIC: float(structural),
        "llds/nonfinite_tokens": sums["nonfinite_tokens"],
    }
    for name, (numerator, denominator) in REGULARISER_RATIOS.items():
        metrics.pop(name, None)
        if sums[denominator] > 0:
            metrics[name] = sums[numerator] / sums[denominator]
    acted = sums["penalised_tokens"] > 0 or math.isnan(sums["penalty_sum"])
    verdict: Verdict = "structural zero" if structural else "active" if acted else "measured zero"
    return StepRecord(step, metrics, series, sums, verdict)
