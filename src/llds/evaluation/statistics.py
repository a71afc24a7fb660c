"""Intervals for shares and means, and paired comparison of two evaluations of the same questions.

All intervals cover 95 % unless another level is given. Questions count as independent draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; ``count`` is the number of questions behind it."""

    value: float
    low: float
    high: float
    count: int


def wilson(successes: int, count: int, level: float = 0.95) -> Estimate:
    """Return a share with its Wilson score interval.

    The interval stays inside [0, 1] and does not shrink to a point when nobody or everybody succeeded.
    Raises ``ValueError`` unless ``0 <= successes <= count`` and ``count > 0``.
    """
    if count <= 0 or not 0 <= successes <= count:
        raise ValueError(f"wilson needs 0 <= successes <= count and count > 0, not {successes} of {count}.")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / count
    spread = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / spread
    half = z / spread * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # The ends touch the share itself at 0 and 1, where rounding would leave them a hair inside.
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)), count)


def bootstrap_mean(values: Sequence[float], level: float = 0.95, seed: int = 0) -> Estimate:
    """Return a mean with its percentile bootstrap interval (2000 resamples, seeded).

    Raises ``ValueError`` when ``values`` is empty.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise ValueError("bootstrap_mean needs at least one value.")
    draws = np.random.default_rng(seed).integers(0, sample.size, size=(RESAMPLES, sample.size))
    means = sample[draws].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(sample.mean()), float(low), float(high), int(sample.size))


def paired_difference(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean of ``after - before`` over the same questions, with a bootstrap interval over
    questions.

    Raises ``ValueError`` when the two have different lengths.
    """
    if len(before) != len(after):
        raise ValueError(
            f"paired_difference needs the same questions twice, not {len(before)} and {len(after)}."
        )
    return bootstrap_mean([new - old for old, new in zip(before, after, strict=True)], seed=seed)


def sign_test(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the two-sided p-value that gains and losses are equally likely (McNemar's exact test for 0/1
    scores).

    Questions whose score did not change say nothing and are left out; without any change the value is 1.
    """
    pairs = list(zip(before, after, strict=True))
    gains = sum(new > old for old, new in pairs)
    losses = sum(new < old for old, new in pairs)
    changed = gains + losses
    tail = sum(math.comb(changed, k) for k in range(min(gains, losses) + 1))
    return min(1.0, float(2 * tail / 2**changed))
