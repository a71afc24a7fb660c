"""What a rank reports of an optimizer step, as plain numbers that stay exact under verl's averaging.

verl averages a loss's metrics over micro-batches, then over data parallel ranks, then over the optimizer
steps of a training step. A mean of ratios is not the ratio of the whole, and a mean of sums is no sum. So
everything is added up on the device, and said once per optimizer step and rank, with its last micro-batch.
Then in the log

- ``llds/loss``, counts (``llds/tokens``, …) and ``llds/sum/…`` are exact: each rank says its own times the
  number of ranks. They are those of one optimizer step, the mean over the steps of a training step.
- ratios over all policy tokens (:func:`over_all_tokens`) are exact in each optimizer step, for verl tells
  every rank how many tokens there are.
- all other ratios are exact where there is one rank. With more, each rank says its own ratio and verl takes
  the plain mean, so a rank with few correct responses weighs as much as one with many; a rank that has
  nothing to say is left out. The exact ones are quotients of ``llds/sum/…``, which :func:`exact_ratios` takes.

Where verl tells the loss nothing of the optimizer batch (the older workers of 0.7), every micro-batch speaks
for itself: then only sums and counts averaged over micro-batches are logged, and ratios of each.

verl puts ``actor/`` before every name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llds.dynamics import LOG_PREFIX, SERIES, Measure, StepAccumulator, read_series
from llds.dynamics.cells import choose
from llds.dynamics.series import read_sum
from llds.dynamics.vocabulary import Quotient
from llds.engines.verl.loss import BatchInfo
from llds.objective import RATIOS

STRUCTURAL = LOG_PREFIX + "structural_zero"
SUM_PREFIX = LOG_PREFIX + "sum/"

#: Name under :data:`SUM_PREFIX` -> additive metric of :func:`llds.llds_loss`, whose signs are called
#: otherwise. These go by the regulariser's own baseline and preserving set.
_SUMS: Mapping[str, str] = {
    "penalty": "penalty_sum",
    "preserved_tokens": "preserved_tokens",
    "penalised_tokens": "penalised_tokens",
    "preserved_actions": "actions_preserved",
    "open_actions": "actions_open",
}
#: Series -> (numerator, denominator) under :data:`SUM_PREFIX`: the ratios that can be had exactly.
SUMMED_RATIOS: Mapping[str, tuple[str, str]] = {
    "gate_rate": ("open_actions", "preserved_actions"),
    "penalised_share": ("penalised_tokens", "preserved_tokens"),
    "penalty": ("penalty", "preserved_tokens"),
    **{
        f"{what}_{sign}": (f"{what}_{sign}", f"{unit}_{sign}")
        for sign in ("correct", "neutral", "wrong")
        for what, unit in (
            ("logprob", "tokens"),
            ("displacement", "tokens"),
            ("lld_actions", "actions"),
            ("lld_responses", "responses"),
        )
    },
}


def over_all_tokens(quotient: Quotient) -> bool:
    """Say whether a ratio is one over all policy tokens."""
    cells = quotient.bottom_cells or quotient.cells
    return quotient.bottom == "tokens" and cells == choose()


def exact_ratios(logged: Mapping[str, float]) -> dict[str, float]:
    """Return the exact value of each series of :data:`SUMMED_RATIOS` from the sums of a log entry.

    ``logged``: names as verl logs them, with or without ``actor/`` in front. The value is that over all
    micro-batches, ranks and optimizer steps of the training step. Series without anything to measure are
    left out.
    """
    sums = {
        key.removeprefix("actor/").removeprefix(SUM_PREFIX): value
        for key, value in logged.items()
        if key.removeprefix("actor/").startswith(SUM_PREFIX)
    }
    return {
        name: sums[top] / sums[bottom]
        for name, (top, bottom) in SUMMED_RATIOS.items()
        if top in sums and sums.get(bottom, 0) > 0
    }


@dataclass
class Window:
    """Adds up the micro-batches of one optimizer step on this rank; waits for the device once, in :meth:`read`.

    ``rows``: responses so far.
    """

    how: Measure
    rows: int = 0
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _dynamics: StepAccumulator | None = None

    def add(self, loss: Tensor, sums: Mapping[str, Tensor], sampled: Mapping[str, Any]) -> None:
        """Add a micro-batch.

        ``loss``: the term as it was added. ``sums``: what :func:`llds.llds_loss` measured. ``sampled``:
        keywords of :func:`llds.dynamics.measure`, the old log-probs being those of the policy that sampled.
        """
        self.rows += len(sampled["logprobs"])
        for name, value in {"loss": loss, **sums}.items():
            if name not in RATIOS:
                wide = value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
                self._sums[name] = self._sums[name] + wide if name in self._sums else wide
        if self._dynamics is None:
            self._dynamics = StepAccumulator(self.how, loss.device)
        self._dynamics.add(**sampled)

    def read(self) -> StepSums:
        """Return everything that was added."""
        assert self._dynamics is not None
        names = list(self._sums)
        stacked = torch.stack([self._sums[name] for name in names])
        numbers = torch.cat([stacked, self._dynamics.sums().to(stacked)]).tolist()
        return StepSums(dict(zip(names, numbers, strict=False)), tuple(numbers[len(names) :]))


@dataclass(frozen=True)
class StepSums:
    """The sums of one optimizer step on one rank: ``objective`` of :func:`llds.llds_loss` and the loss,
    ``dynamics`` of :func:`llds.dynamics.measure`.
    """

    objective: Mapping[str, float]
    dynamics: tuple[float, ...]

    @property
    def is_unmoved(self) -> bool:
        """Whether no token's log-prob differed from the one to hold, bit for bit."""
        return not self.objective["moved_tokens"]

    def metrics(self, info: BatchInfo, structural: bool, coef: float) -> dict[str, float]:
        """Return what to log, by name; see the module on what verl makes of it."""
        ranks, own = info.ranks, self.objective
        series = read_series(self.dynamics)
        of_all = ranks * own["tokens"] / info.tokens if info.tokens else 1.0
        logged = {}
        for name, value in series.items():
            quotient = SERIES[name].quotient
            if value is not None and quotient is not None:
                weight = 1.0 if quotient.bottom else ranks
                logged[LOG_PREFIX + name] = value * (of_all if over_all_tokens(quotient) else weight)
        sums = self._sums()
        for name in ("gate_rate", "penalised_share", "penalty"):
            top, bottom = SUMMED_RATIOS[name]
            logged.pop(LOG_PREFIX + name, None)
            if sums[bottom] > 0:
                logged[LOG_PREFIX + name] = sums[top] / sums[bottom]
        logged[LOG_PREFIX + "preserved_share"] = (
            own["preserved_tokens"] / own["tokens"] * of_all if own["tokens"] else 0.0
        )
        return {
            "llds/coef": coef,
            "llds/loss": own["loss"],
            STRUCTURAL: float(structural),
            **logged,
            "llds/nonfinite_tokens": own["nonfinite_tokens"] * ranks,
            **{SUM_PREFIX + name: value * ranks for name, value in sums.items()},
        }

    def _sums(self) -> dict[str, float]:
        """Return the sums of :data:`SUMMED_RATIOS` on this rank."""
        sums = {name: self.objective[source] for name, source in _SUMS.items()}
        for name, (top, bottom) in SUMMED_RATIOS.items():
            quotient = SERIES[name].quotient
            if top not in _SUMS and quotient is not None:
                sums[top] = read_sum(quotient.top, quotient.cells, self.dynamics)
                sums[bottom] = read_sum(quotient.bottom, quotient.cells, self.dynamics)
        return sums
