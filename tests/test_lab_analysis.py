"""Verdicts, summaries and ROC curves on runs whose truth is known."""

import numpy as np
import pytest

from llds.dynamics.synthetic import sharpening, spiral
from llds.lab.analysis import (
    SIGNALS,
    judge,
    levels,
    monitor_point,
    paired,
    roc,
    statistic,
    summarise,
    windows,
)
from llds.lab.series import StoredRun

LENGTH = 60


def stored(reward, seed=0, **columns):
    reward = np.asarray(reward, float)
    flat = {"searches": np.full(len(reward), 1.6), "action_tokens": np.full(len(reward), 17.0)}
    return StoredRun(seed, {"reward": reward, **flat, **columns}, 10, 20.0)


def collapse(at=30, seed=0, **columns):
    noise = np.random.default_rng(seed).normal(0, 0.01, LENGTH)
    return stored(np.where(np.arange(LENGTH) < at, 0.3, 0.0) + noise, seed, **columns)


def held(seed=0, level=0.3, **columns):
    return stored(level + np.random.default_rng(100 + seed).normal(0, 0.01, LENGTH), seed, **columns)


def test_levels_are_trailing_means_of_what_is_there():
    values = np.array([np.nan, 1.0, 3.0, np.nan, 5.0])
    np.testing.assert_array_equal(levels(values, 2), [np.nan, 1.0, 2.0, 3.0, 5.0])


def test_fates():
    one = judge(collapse(30))
    assert one.fate == "collapsed"
    assert one.drop == pytest.approx(35, abs=1)
    assert one.is_gradual
    assert judge(held()).fate == "held"
    assert judge(stored(np.linspace(0.3, 0.15, LENGTH))).fate == "faded"
    back = np.full(LENGTH, 0.3)
    back[20:40] = 0.0
    assert judge(stored(back)).fate == "dipped"
    assert judge(stored(np.zeros(LENGTH))).fate == "held"


def test_gradual_means_that_conduct_lasts_until_the_drop():
    searches = np.where(np.arange(LENGTH) < 25, 1.6, 0.2)
    assert not judge(collapse(30, searches=searches)).is_gradual
    longer = np.where(np.arange(LENGTH) < 25, 17.0, 40.0)
    assert not judge(collapse(30, action_tokens=longer)).is_gradual
    assert judge(collapse(30, searches=np.where(np.arange(LENGTH) < 40, 1.6, 0.2))).is_gradual


def from_synthetic(made):
    """A synthetic run of the dynamics room, whose phases are known, as if it were a stored one."""
    names = {name for row in made.rows for name, value in row.items() if value is not None}
    columns = {
        name: np.array([np.nan if row.get(name) is None else row[name] for row in made.rows], float)
        for name in names
    }
    # There a row is an update; here it is a rollout, whose displacement is that of the mean update.
    age = np.maximum(columns.pop("updates_since_rollout"), 1)
    columns["displacement_correct"] = columns["displacement_correct"] / age * 4.5
    return StoredRun(0, columns, 10, 1.0)


def test_the_monitor_is_replayed():
    made = spiral(1, steps=190)
    one = judge(from_synthetic(made))
    assert made.onset - 5 <= one.phase_two <= one.phase_three
    assert abs(one.onset - made.onset) <= 12
    assert made.onset <= one.alarm <= made.acceleration + 5
    assert judge(from_synthetic(sharpening(4))).alarm is None


def test_windows_of_a_collapsed_run():
    reward = np.full(LENGTH, 0.2)
    reward[10:20], reward[35:] = 0.4, 0.0
    run = stored(reward, kl=np.arange(LENGTH, dtype=float))
    drop = judge(run).drop
    means = windows(run, "kl")
    assert list(means) == ["start", "around the best", "before the drop", "after the drop"]
    assert list(means.values()) == [4.5, 14.5, drop - 5.5, drop + 4.5]
    assert np.isnan(windows(run, "not measured")["start"])


def test_a_summary_counts_and_brackets():
    runs = [collapse(20, 0), collapse(40, 1), held(2), held(3, level=0.4)]
    summary = summarise(runs)
    assert (summary.runs, summary.gradual, summary.faded) == (4, 2, 0)
    assert summary.collapsed.value == 0.5
    assert summary.collapsed.low < 0.2 < 0.8 < summary.collapsed.high
    assert summary.final.value == pytest.approx(0.175, abs=0.01)
    assert summary.final.low < summary.final.value < summary.final.high
    assert summary.drop == pytest.approx(35, abs=1)


def test_pairs_are_of_the_same_seeds():
    difference = paired([held(0), held(1)], [held(1, level=0.5), held(2, level=0.9)])
    assert difference.count == 1
    assert difference.value == pytest.approx(0.2, abs=0.001)
    assert paired([held(0)], [held(1)]) is None


def test_the_statistic_never_looks_ahead():
    values = np.random.default_rng(0).normal(0, 1, LENGTH)
    whole = statistic(values, +1)
    for end in (10, 25, 59):
        np.testing.assert_array_equal(statistic(values[:end], +1), whole[:end])
    changed = values.copy()
    changed[40:] += 100
    np.testing.assert_array_equal(statistic(changed, +1)[:40], whole[:40])


def test_the_statistic_knows_good_from_bad():
    rising = np.linspace(0, 1, LENGTH) + np.random.default_rng(0).normal(0, 0.01, LENGTH)
    assert statistic(rising, +1).max() > 20
    assert statistic(rising, -1).max() < 5
    assert statistic(np.full(LENGTH, np.nan), +1).max() == 0


def noisy(seed, jump_at=None):
    values = np.random.default_rng(seed).normal(0, 0.01, LENGTH)
    if jump_at is not None:
        values[jump_at:] += 1
    return values


def test_a_perfect_signal_has_area_one_and_the_right_lead():
    ill = [collapse(40, seed, displacement_correct=noisy(seed, 15)) for seed in range(8)]
    well = [held(seed, displacement_correct=noisy(seed + 50)) for seed in range(8)]
    one = roc("displacement of correct", ill, well)
    assert one.area == pytest.approx(1.0)
    assert one.caught == 1.0
    assert one.lead == pytest.approx(45 - 15, abs=2)
    assert one.points[0] == (0.0, 0.0)
    assert one.points[-1] == (1.0, 1.0)


def test_a_signal_that_comes_too_late_catches_nothing():
    ill = [collapse(30, seed, displacement_correct=noisy(seed, 55)) for seed in range(12)]
    well = [held(seed, displacement_correct=noisy(seed + 50)) for seed in range(12)]
    one = roc("displacement of correct", ill, well)
    assert one.area < 0.75
    assert one.lead == 0


def test_an_empty_signal_is_worth_nothing():
    ill, well = [collapse(30, seed) for seed in range(5)], [held(seed) for seed in range(5)]
    one = roc("KL to the start", ill, well)
    assert one.area == pytest.approx(0.5)
    assert one.caught == 0


def test_even_exposure_forgives_what_comes_later():
    ill = [collapse(40, seed, displacement_correct=noisy(seed, 20)) for seed in range(8)]
    well = [held(seed, displacement_correct=noisy(seed + 50, 55)) for seed in range(8)]
    one = roc("displacement of correct", ill, well)
    assert one.area < 0.9
    assert one.even == pytest.approx(1.0)
    assert roc("displacement of correct", ill, ill).even == pytest.approx(0.5, abs=0.2)


def test_every_signal_looks_at_a_series_that_is_kept():
    from llds.lab.loop import KEPT

    others = {"reward", "searches", "malformed", "grad_norm", "kl"}
    assert {series for series, _ in SIGNALS.values()} <= {*KEPT, *others}


def test_the_monitors_point():
    ill, well = from_synthetic(spiral(1, steps=190)), from_synthetic(sharpening(4))
    false, caught, lead = monitor_point([ill], [well, well])
    assert (false, caught) == (0.0, 1.0)
    assert lead == judge(ill).drop - judge(ill).alarm
    critical = monitor_point([ill], [well, well], "critical")
    assert critical[:2] == (0.0, 1.0)
    assert 0 < critical[2] <= lead
    assert monitor_point([well], [ill], "critical")[:2] == (1.0, 0.0)
