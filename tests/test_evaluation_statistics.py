"""Intervals: known values, coverage, edges."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llds.evaluation.statistics import (
    bootstrap_mean,
    holm,
    paired_difference,
    pass_at_k,
    sign_flip_test,
    sign_test,
    stratified_mean,
    wilson,
)


def test_wilson_known_values():
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    for successes, count, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        estimate = wilson(successes, count)
        assert estimate.value == successes / count
        assert estimate.low == pytest.approx(low, abs=5e-5)
        assert estimate.high == pytest.approx(high, abs=5e-5)


def test_wilson_is_symmetric_and_holds_its_value():
    for count in (1, 7, 50):
        for successes in range(count + 1):
            here, there = wilson(successes, count), wilson(count - successes, count)
            assert here.low <= here.value <= here.high
            assert here.low == pytest.approx(1 - there.high)


@pytest.mark.parametrize(("successes", "count"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_nonsense(successes, count):
    with pytest.raises(ValueError, match="0 <= successes <= count"):
        wilson(successes, count)


def test_bootstrap_covers_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        estimate = bootstrap_mean(rng.normal(1.0, 2.0, size=80), seed=trial)
        hits += estimate.low <= 1.0 <= estimate.high
    assert 0.89 <= hits / 200 <= 0.99


def test_bootstrap_is_repeatable_and_exact_on_constants():
    values = [0.0, 1.0, 1.0, 0.5]
    assert bootstrap_mean(values, seed=3) == bootstrap_mean(values, seed=3)
    estimate = bootstrap_mean([0.25] * 9)
    assert (estimate.value, estimate.low, estimate.high, estimate.count) == (0.25, 0.25, 0.25, 9)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_mean([])


def test_pairing_uses_the_pairs():
    before, after = [0.0, 1.0] * 50, [0.0, 1.0] * 50
    same = paired_difference(before, after)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    gain = paired_difference([0.0] * 100, [1.0] * 30 + [0.0] * 70)
    assert gain.value == pytest.approx(0.3)
    assert 0.2 < gain.low < 0.3 < gain.high < 0.4
    with pytest.raises(ValueError, match="same questions"):
        paired_difference([0.0], [])


def test_sign_test_known_values():
    assert sign_test([0, 0, 1], [0, 0, 1]) == 1.0
    assert sign_test([0] * 5, [1] * 5) == pytest.approx(2 / 32)
    before, after = [0] * 8 + [1] * 2, [1] * 8 + [0] * 2
    exact = 2 * sum(math.comb(10, k) for k in range(3)) / 2**10
    assert sign_test(before, after) == pytest.approx(exact)
    assert sign_test(after, before) == pytest.approx(exact)
    assert sign_test([0, 1], [1, 0]) == 1.0


def test_stratified_mean_counts_strata_alike():
    estimate = stratified_mean([[1.0] * 300 + [0.0] * 100, [0.0, 1.0, 0.0, 0.0]])
    assert estimate.value == pytest.approx((0.75 + 0.25) / 2)
    assert estimate.count == 404
    assert estimate.low < 0.5 < estimate.high
    # The small stratum brings nearly all of the doubt: its mean has a standard deviation of .2165, half of it here.
    assert estimate.high - estimate.low > 1.5 * 0.2165
    assert stratified_mean([[0.0, 1.0, 0.5]]) == stratified_mean([[0.0, 1.0, 0.5]])
    for nothing in ([], [[]], [[1.0], []]):
        with pytest.raises(ValueError, match="at least one stratum"):
            stratified_mean(nothing)


def test_one_stratum_is_the_ordinary_bootstrap():
    values = np.random.default_rng(3).random(400).round(1)
    ends = [
        [(one.low, one.high) for one in (way(seed) for seed in range(20))]
        for way in (
            lambda seed: stratified_mean([values], seed),
            lambda seed: bootstrap_mean(values, seed=seed),
        )
    ]
    assert stratified_mean([values]).value == bootstrap_mean(values).value
    # Over 20 seeds the ends of both have a standard error of 0.0002.
    assert np.mean(ends[0], axis=0) == pytest.approx(np.mean(ends[1], axis=0), abs=0.001)


def test_stratified_intervals_cover_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    shares, sizes = [0.4, 0.1, 0.3, 0.02], [120, 60, 200, 125]
    hits = 0
    for trial in range(400):
        strata = [rng.random(size) < share for share, size in zip(shares, sizes, strict=True)]
        estimate = stratified_mean([stratum.astype(float) for stratum in strata], seed=trial)
        hits += estimate.low <= np.mean(shares) <= estimate.high
    assert 0.92 <= hits / 400 <= 0.98


def test_nobody_right_is_not_without_doubt():
    assert stratified_mean([[0.0] * 200]) == wilson(0, 200)
    assert stratified_mean([[1.0] * 9]) == wilson(9, 9)
    several = stratified_mean([[0.0] * 100, [0.0] * 100])
    assert several.value == several.low == 0.0
    assert 0.005 < several.high < 0.04
    # A difference that is 0 throughout is not a share of anything.
    assert stratified_mean([[0.0] * 9], shares=False).high == 0.0


def test_sign_flips_of_one_stratum_are_the_sign_test():
    rng = np.random.default_rng(5)
    for gains, losses in [(8, 2), (30, 12), (5, 5), (0, 0), (1, 0), (60, 20)]:
        differences = [1.0] * gains + [-1.0] * losses + [0.0] * 20
        rng.shuffle(differences)
        exact = sign_test([0.0] * len(differences), differences)
        assert sign_flip_test([differences]) == pytest.approx(exact, abs=0.012)
    assert sign_flip_test([[1.0] * 40]) == pytest.approx(1 / 20_001)


def test_sign_flips_are_calibrated_over_strata():
    rng = np.random.default_rng(2)
    below = 0
    for trial in range(300):
        strata = [rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], size=size) for size in (40, 90, 25)]
        below += sign_flip_test(strata, seed=trial, flips=1000) <= 0.05
    assert 0.02 <= below / 300 <= 0.09


def test_holm_known_values():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_all_draws(samples, data):
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    answers = [True] * right + [False] * (samples - right)
    draws = [any(draw) for draw in itertools.combinations(answers, k)]
    assert pass_at_k(samples, right, k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize(("samples", "right", "k"), [(3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)])
def test_pass_at_k_refuses_nonsense(samples, right, k):
    with pytest.raises(ValueError, match="pass_at_k needs"):
        pass_at_k(samples, right, k)
