"""Robust statistics of one series at a time, online: each uses what it has seen, nothing that comes later.

They are plain data that turns into JSON and back, so a resumed run goes on exactly where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

#: Values that the noise of a series is estimated from.
MEMORY = 64
#: Values among which an onset is looked for.
LONG_MEMORY = 256
#: A median absolute deviation times this is the standard deviation of normal noise.
_TO_SIGMA = 1.4826


def noise_scale(values: Sequence[float]) -> float:
    """Return the standard deviation of the noise in a series, from the median step between neighbours.

    A trend or a jump hardly changes it, and neither do outliers as long as they touch less than half of the
    steps. 0 for fewer than 2 values.
    """
    steps = [abs(b - a) for a, b in pairwise(values)]
    return _TO_SIGMA * median(steps) / math.sqrt(2) if steps else 0.0


@dataclass
class Track:
    """The last values of a series with their steps."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Append a value and forget the oldest beyond :data:`LONG_MEMORY`."""
        self.steps = [*self.steps[1 - LONG_MEMORY :], step]
        self.values = [*self.values[1 - LONG_MEMORY :], value]

    def noise(self) -> float:
        """Return the noise of the latest values."""
        return noise_scale(self.values[-MEMORY:])


def find_onset(risen: Track, falling: Track, shortest: int = 3) -> int | None:
    """Return the step from which on ``risen`` is higher and ``falling`` goes down: the best fit to both.

    By least squares, each in units of its noise: a jump from one mean to another in ``risen``, at most ±3
    units from its median, and a straight line that bends down in ``falling``. At least ``shortest`` values of
    the longer track lie on either side. None if neither fits.
    """
    longer = max(risen.steps, falling.steps, key=len)
    candidates = torch.tensor(longer[shortest:-shortest], dtype=torch.float64)
    if not candidates.numel():
        return None
    gain = torch.zeros_like(candidates)
    for track, is_jump in ((risen, True), (falling, False)):
        since = torch.tensor(track.steps, dtype=torch.float64) - candidates.unsqueeze(1)
        values = torch.tensor(track.values, dtype=torch.float64) / max(track.noise(), 1e-12)
        if is_jump and track.values:
            middle = median(values.tolist())
            gain += _explained(values.clamp(middle - 3, middle + 3), (since >= 0).double())
        elif track.values:
            gain += _explained(-values, since.relu())
    best = int(gain.argmax())
    return int(candidates[best]) if gain[best] > 0 else None


def _explained(values: Tensor, shapes: Tensor) -> Tensor:
    """Return how much of the square of ``values`` [n] a positive multiple of each shape [S, n] explains."""
    centred = shapes - shapes.mean(1, keepdim=True)
    size = centred.square().sum(1)
    return (centred @ (values - values.mean())).relu().square() / size.clamp(min=1e-12)


@dataclass
class Drift:
    """How far a series has moved from its best level towards the bad side, in units of its own noise.

    The level is the median of the last ``short`` values, the best level the best median of ``long`` values so
    far: so it follows improvement and never forgets it. ``bad``: +1 where rising is bad, −1 where falling is.
    ``least``: a smaller move is none, however small the noise. ``warmup``: values before it speaks.
    """

    bad: int
    least: float
    short: int = 7
    long: int = 15
    warmup: int = 20
    seen: int = 0
    best: float | None = None
    recent: list[float] = field(default_factory=list)

    def update(self, value: float | None) -> float | None:
        """Take the next value; return the distance, None during warm-up and without a value."""
        if value is None:
            return None
        self.seen += 1
        self.recent = [*self.recent[1 - MEMORY :], value]
        if self.seen >= self.long:
            level = self.bad * median(self.recent[-self.long :])
            self.best = level if self.best is None else min(self.best, level)
        if self.best is None or self.seen < self.warmup:
            return None
        moved = self.bad * median(self.recent[-self.short :]) - self.best
        return moved / max(noise_scale(self.recent), 1e-12) if moved >= self.least else 0.0

    def improvement(self) -> float:
        """Return how far the last ``long`` values lie on the good side of those 2 · ``long`` before them.

        In units of the noise; 0 while there are too few values.
        """
        if len(self.recent) < 3 * self.long:
            return 0.0
        before, now = (
            median(part) for part in (self.recent[-3 * self.long : -2 * self.long], self.recent[-self.long :])
        )
        return self.bad * (before - now) / max(noise_scale(self.recent), 1e-12)


@dataclass
class Persistence:
    """Whether a series stays above a bound: a one-sided cumulative sum, capped so that it can fall again.

    Each value counts by its distance from ``above`` in units of the series' noise, at most ±3, less
    ``slack``.
    """

    above: float
    slack: float = 0.5
    cap: float = 16.0
    warmup: int = 10
    total: float = 0.0
    track: Track = field(default_factory=Track)

    def update(self, step: int, value: float | None) -> float | None:
        """Take the value of ``step``; return the sum, None during warm-up and without a value."""
        if value is None:
            return None
        self.track.add(step, value)
        if not self.is_measured:
            return None
        scaled = (value - self.above) / max(self.track.noise(), self.above, 1e-12)
        self.total = min(self.cap, max(0.0, self.total + max(-3.0, min(3.0, scaled)) - self.slack))
        return self.total

    @property
    def is_measured(self) -> bool:
        """Whether there were enough values to speak."""
        return len(self.track.values) >= self.warmup

    def accelerates(self, onset: int, recent: int = 12, factor: float = 2.0) -> bool:
        """Say whether the last ``recent`` values since ``onset`` are ``factor`` times the others since then.

        By their medians, and by more than three standard errors.
        """
        since = [
            value for step, value in zip(self.track.steps, self.track.values, strict=True) if step >= onset
        ]
        before, now = since[:-recent], since[-recent:]
        if len(before) < recent:
            return False
        error = self.track.noise() * math.sqrt(1 / len(before) + 1 / recent)
        base = max(self.above, median(before))
        return median(now) > max(factor * base, base + 3 * error)


@dataclass
class Latch:
    """A switch with hysteresis: on at ``high``, off only below ``low`` for ``patience`` values in a row."""

    high: float
    low: float
    patience: int = 5
    is_on: bool = False
    calm: int = 0

    def update(self, value: float | None) -> bool:
        """Take the next statistic and return whether the switch is on; None leaves it as it is."""
        if value is None:
            return self.is_on
        self.calm = self.calm + 1 if value < self.low else 0
        if value >= self.high:
            self.is_on = True
        elif self.calm >= self.patience:
            self.is_on = False
        return self.is_on
