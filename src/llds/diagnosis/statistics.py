"""Robust statistics of one series, causal: what they say at a row depends on this row and those before.

A series is smoothed by running medians of 5 and of 15 values. A change is the distance of a median from the
best one so far, in units of the series' own noise: 1.4826 / √2 times the median step between neighbouring
values, over the last 64. Trends and jumps hardly change that, and neither do outliers. Since the first
medians count too, a collapse within the first rows is measured against those before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llds.diagnosis.findings import Family

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_SHORT, _LONG = 5, 15
_MEMORY = 64
_PERSIST = 3
# Standard error of a median of normal values, in standard deviations over √n.
_MEDIAN_ERROR = 1.2533


def running_median(values: Floats, width: int) -> Floats:
    """Return the median of the last ``width`` values at each place, of fewer at the beginning: [N]."""
    padded = np.concatenate([np.full(width - 1, np.nan), values])
    return (
        np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)
        if len(values)
        else values
    )


def running_noise(values: Floats) -> Floats:
    """Return the noise at each place: standard deviation of independent values with such steps, [N].

    Places with fewer than three steps get what is known by then, the first 0.
    """
    if len(values) < 2:
        return np.zeros(len(values))
    steps = np.abs(np.diff(values, prepend=np.nan))
    padded = np.concatenate([np.full(_MEMORY - 1, np.nan), steps])
    windows = np.lib.stride_tricks.sliding_window_view(padded, _MEMORY)
    noise = np.zeros(len(values))
    noise[1:] = 1.4826 / np.sqrt(2) * np.nanmedian(windows[1:], axis=1)
    return noise


@dataclass(frozen=True)
class Rule:
    """What counts as a change of a series.

    ``series``: its canonical name; ``family``: the independent kind of signal it belongs to. ``direction``: +1
    where rising is the change, -1 where falling is. ``effect``: least size, in units of the series, or as a
    factor with ``ratio``. ``floor``: subtracted first with ``ratio``, for a series that cannot fall below it.
    ``relative``: least size as a share of the best value, besides ``effect``. ``least``: least size in units of
    the series, besides the factor. ``z``: least size in standard errors.
    """

    series: str
    family: Family
    direction: Literal[-1, 1]
    effect: float
    ratio: bool = False
    floor: float = 0.0
    relative: float = 0.0
    least: float = 0.0
    z: float = 5.0


@dataclass(frozen=True)
class Track:
    """A rule followed through a log.

    ``rows`` [M]: rows of the table that have a value. ``level``: its running median of five. ``best``: the best
    median so far, in the direction that is no change. ``on``: whether the change is there and has lasted for
    three values.
    """

    rule: Rule
    rows: NDArray[np.int64]
    raw: Floats
    level: Floats
    best: Floats
    on: Bools

    @property
    def first(self) -> int | None:
        """The place of the first value at which the change had lasted; None if it never did."""
        return int(self.on.argmax()) if self.on.any() else None

    @property
    def holds(self) -> bool:
        """Whether the change is still there at the end."""
        return bool(len(self.on) and self.on[-1])

    def share_on(self, after: int) -> float:
        """Return the share of values from ``after`` on at which the change is there."""
        return float(self.on[after:].mean()) if after < len(self.on) else 0.0


def follow(rule: Rule, values: Floats, half_width: float = 0.0) -> Track:
    """Follow a rule through a series.

    ``values`` [N], NaN where there is none. ``half_width``: of rounding, which is noise too.
    """
    rows = np.flatnonzero(np.isfinite(values))
    raw = values[rows]
    scaled = _scaled(rule, raw)
    noise = np.maximum(running_noise(scaled), _least_noise(rule, scaled, half_width))
    on = np.zeros(len(rows), dtype=bool)
    for width in (_SHORT, _LONG):
        on |= _lasting(_changed(rule, raw, scaled, noise, width))
    level = running_median(raw, _SHORT)
    return Track(rule, rows, raw, level, _best(level, rule.direction), on)


def _scaled(rule: Rule, raw: Floats) -> Floats:
    if not rule.ratio:
        return raw
    above = np.maximum(raw - rule.floor, 0.0)
    positive = above[above > 0]
    # Nothing at all is a fall by a large factor, not by an infinite one, and what is left there is noise.
    least = max(1e-12, 0.05 * float(np.median(positive[:_MEMORY]))) if positive.size else 1e-12
    return np.log(np.maximum(above, least))


def _least_noise(rule: Rule, scaled: Floats, half_width: float) -> float:
    if rule.ratio:
        return 0.01
    spread = float(np.median(np.abs(scaled))) if scaled.size else 0.0
    return max(half_width, 1e-3 * spread, 1e-12)


def _best(level: Floats, direction: int) -> Floats:
    """Return the best level so far, leaving out the very first two values, which are single draws."""
    if direction > 0:
        return np.minimum.accumulate(level)
    return np.maximum.accumulate(level)


def _changed(rule: Rule, raw: Floats, scaled: Floats, noise: Floats, width: int) -> Bools:
    level = running_median(scaled, width)
    count = np.minimum(np.arange(1, len(level) + 1), width)
    settled = count >= min(3, width)
    reference = np.where(settled, level, np.nan)
    best = _best_of(reference, rule.direction)
    change = rule.direction * (level - best)
    error = _MEDIAN_ERROR * noise * np.sqrt(1 / count + 1 / np.minimum(count, width))
    needed = np.full(len(level), np.log(rule.effect) if rule.ratio else rule.effect)
    if rule.relative:
        needed = np.maximum(needed, rule.relative * np.maximum.accumulate(np.abs(np.nan_to_num(best))))
    with np.errstate(invalid="ignore"):
        return (change >= needed) & (change >= rule.z * error) & settled & _far(rule, raw, width)


def _far(rule: Rule, raw: Floats, width: int) -> Bools:
    """Say where a change is large enough in units of the series too."""
    level = running_median(raw, width)
    far: Bools = rule.direction * (level - _best(level, rule.direction)) >= rule.least
    return far


def _best_of(reference: Floats, direction: int) -> Floats:
    filled = np.where(np.isnan(reference), np.inf if direction > 0 else -np.inf, reference)
    best = np.minimum.accumulate(filled) if direction > 0 else np.maximum.accumulate(filled)
    return np.where(np.isfinite(best), best, np.nan)


def _lasting(flags: Bools) -> Bools:
    """Keep what has been there for three values in a row."""
    lasting = flags.copy()
    for back in range(1, _PERSIST):
        lasting[back:] &= flags[:-back]
        lasting[:back] = False
    return lasting


def onset_of(track: Track, until: int | None = None) -> tuple[int, int, int]:
    """Return where a change began, and between which places it may have: all are places of the track.

    The change is the one that is there first. It reaches from the best level before it to the most extreme one
    within the time until it was noticed and as long again. It began after the last value that had gone less than 10 %
    of that way, and no further than noise goes; the interval is from 5 % to 30 %.
    """
    first = track.first
    assert first is not None
    direction = track.rule.direction
    start = int(np.argmax(-direction * track.level[: first + 1]))
    end = min(len(track.level), first + max(8, first - start) + 1, until or len(track.level))
    after = direction * track.level[first:end]
    extreme = float(after.max()) * direction
    best = float(track.level[start])
    # A median of five lags by two values.
    path = direction * (_centred(track.raw)[: first + 1] - best)
    whole = direction * (extreme - best)
    # What noise alone does to a median of three is no beginning.
    blur = min(2.5 * _MEDIAN_ERROR * float(running_noise(track.raw)[first]) / np.sqrt(3), 0.5 * whole)
    places = [_last_below(path, start, max(share * whole, blur)) + 1 for share in (0.05, 0.1, 0.3)]
    return min(places[1], first), min(places[0], first), min(max(places[2], places[1]), first)


def _centred(raw: Floats) -> Floats:
    padded = np.concatenate([np.full(1, np.nan), raw, np.full(1, np.nan)])
    middle: Floats = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 3), axis=1)
    return middle


def _last_below(path: Floats, start: int, bound: float) -> int:
    below = np.flatnonzero(path[start:] < bound)
    return start + (int(below[-1]) if below.size else 0)


@dataclass(frozen=True)
class Jump:
    """A step in a series between two neighbouring values: ``place`` is the first value after it."""

    place: int
    before: float
    after: float


def jumps(
    values: Floats, direction: int, z: float = 4.0, least: float = 0.0, share: float = 0.3
) -> list[Jump]:
    """Find steps of a series in ``direction``: the medians of up to eight values before and of three after differ by
    ``z`` noises, by ``least`` and by ``share`` of the level, and nothing lies between.

    ``values`` [M], without NaN.
    """
    found: list[Jump] = []
    noise = running_noise(values)
    for place in range(4, len(values) - 2):
        before, after = values[max(0, place - 8) : place], values[place : place + 3]
        low, high = float(np.median(before)), float(np.median(after))
        size = direction * (high - low)
        spread = max(float(noise[place - 1]), 1e-3 * abs(low), 1e-12)
        is_step = direction * (after.min() if direction > 0 else after.max()) > direction * low + 0.35 * size
        was_flat = direction * float(np.median(values[max(0, place - 2) : place]) - low) < 0.25 * size
        if size > max(z * spread, least, share * abs(low)) and is_step and was_flat:
            if found and place - found[-1].place < 3:
                continue
            found.append(Jump(place, low, high))
    return found
