"""What a loss reports: sums and counts that add up, and the ratios made of them.

Sums and counts may be added over micro-batches, steps and ranks. Ratios may not: the mean of two ratios is
not the ratio of the whole. So add the parts first (:func:`merge_metrics`) and take the ratios once, at the
end.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

#: Signs of the advantage, by which likelihood is reported.
SIGNS = ("positive", "zero", "negative")

#: Ratio -> (numerator, denominator), both additive. 0 of 0 is NaN: there was nothing to measure.
RATIOS: Mapping[str, tuple[str, str]] = {
    "preserved_share": ("preserved_tokens", "tokens"),
    "penalised_share": ("penalised_tokens", "preserved_tokens"),
    "moved_share": ("moved_tokens", "tokens"),
    "gate_rate": ("actions_open", "actions_preserved"),
    "displacement_abs": ("displacement_abs_sum", "tokens"),
    **{f"displacement_{sign}": (f"displacement_sum_{sign}", f"tokens_{sign}") for sign in SIGNS},
    **{f"logprob_{sign}": (f"logprob_sum_{sign}", f"tokens_{sign}") for sign in SIGNS},
    "clip_share": ("clipped_tokens", "tokens"),
    "ratio_mean": ("ratio_sum", "tokens"),
    "kl": ("kl_sum", "tokens"),
}


class LLDSOutput(NamedTuple):
    """A loss and what was measured on the way.

    ``loss``: 0-dim, differentiable, already times its coefficient. ``metrics``: name to 0-dim detached
    tensor, on the device of the log-probs; counts are int64, sums and ratios floating point.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def with_ratios(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``sums`` and every ratio of :data:`RATIOS` whose two parts are among them."""
    ratios = {name: sums[a] / sums[b] for name, (a, b) in RATIOS.items() if a in sums and b in sums}
    return {**sums, **ratios}


def merge_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Add the sums and counts of several calls, then take the ratios of the whole."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if name not in RATIOS:
                total[name] = total[name] + value if name in total else value
    return with_ratios(total)
