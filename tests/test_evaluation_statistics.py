"""Intervals: known values, coverage, edges."""

import math

import numpy as np
import pytest

from llds.evaluation.statistics import bootstrap_mean, paired_difference, sign_test, wilson


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
