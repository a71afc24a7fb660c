"""Intervals for shares and means, and paired comparison of two evaluations of the same questions.

All intervals cover 95 % unless another level is given. Questions count as independent draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

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


def stratified_mean(
    strata: Sequence[Sequence[float]], seed: int = 0, level: float = 0.95, *, shares: bool = True
) -> Estimate:
    """Return the mean of the means of ``strata``, every stratum counting the same, with a bootstrap interval.

    Questions are drawn anew within each stratum (2000 resamples, seeded, percentiles). ``count`` is the number
    of values in all. ``shares``: the values are scores in [0, 1]. Of nothing but 0, or nothing but 1, resampling
    would show no doubt at all: one such stratum alone gets Wilson's interval, and among several its mean is drawn
    from Beta(right + ½, wrong + ½). Raises ``ValueError`` without strata, or for an empty one.
    """
    samples = [np.asarray(values, dtype=np.float64) for values in strata]
    if not samples or any(sample.size == 0 for sample in samples):
        raise ValueError("stratified_mean needs at least one stratum, and values in each.")
    count = sum(sample.size for sample in samples)
    value = float(np.mean([sample.mean() for sample in samples]))
    constant = [shares and bool(np.all(sample == sample[0]) and sample[0] in (0, 1)) for sample in samples]
    if len(samples) == 1 and constant[0]:
        return wilson(count * int(value), count, level)
    rng = np.random.default_rng(seed)
    draws = [
        _drawn_share(sample, rng) if same else _resampled_means(sample, rng)
        for sample, same in zip(samples, constant, strict=True)
    ]
    low, high = np.quantile(np.mean(draws, axis=0), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, min(value, float(low)), max(value, float(high)), count)


def _resampled_means(sample: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the means of ``RESAMPLES`` samples of the same size, drawn with replacement.

    How often each value is drawn is multinomial, so no question is drawn one by one: scores take few values, and
    a benchmark of ten thousand questions costs no more than one of a hundred.
    """
    values, counts = np.unique(sample, return_counts=True)
    drawn = rng.multinomial(sample.size, counts / sample.size, size=RESAMPLES)
    means: NDArray[np.float64] = drawn @ values / sample.size
    return means


def _drawn_share(sample: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    right = sample.sum()
    return rng.beta(right + 0.5, sample.size - right + 0.5, size=RESAMPLES)


def sign_flip_test(strata: Sequence[Sequence[float]], seed: int = 0, flips: int = 20_000) -> float:
    """Return the two-sided p-value of the mean of the strata's mean differences being 0.

    Under the null hypothesis each question's difference is as likely with the other sign. Monte Carlo over
    ``flips`` random assignments of signs, seeded; the least value is 1 / (flips + 1). With one stratum of
    differences -1, 0, 1 it is the sign test. Raises ``ValueError`` as :func:`stratified_mean`.
    """
    samples = [np.asarray(values, dtype=np.float64) for values in strata]
    if not samples or any(sample.size == 0 for sample in samples):
        raise ValueError("sign_flip_test needs at least one stratum, and values in each.")
    rng = np.random.default_rng(seed)
    observed = np.mean([sample.mean() for sample in samples])
    flipped = np.zeros(flips)
    for sample in samples:
        sizes, counts = np.unique(np.abs(sample[sample != 0]), return_counts=True)
        for size, count in zip(sizes, counts, strict=True):
            flipped += size * (2 * rng.binomial(count, 0.5, size=flips) - count) / sample.size
    flipped /= len(samples)
    # What differs by rounding alone counts as equal.
    at_least = int(np.sum(np.abs(flipped) >= abs(observed) - 1e-12))
    return (at_least + 1) / (flips + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for being several, by Holm's step-down method, in the same order.

    With them the chance of any false finding among all is at most the level, however they depend on each other.
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of ``k`` answers is right.

    ``1 - C(samples - right, k) / C(samples, k)`` (Chen et al., arXiv 2107.03374). Raises ``ValueError`` unless
    ``0 <= right <= samples`` and ``1 <= k <= samples``.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass_at_k needs 0 <= right <= samples, 1 <= k <= samples, not {right}, {samples}, {k}."
        )
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
