"""The monitor on synthetic runs of known truth, and what must hold for any run."""

import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llds.dynamics import PHASES, PhaseMonitor, PhaseSettings, synthetic
from llds.dynamics.detectors import Drift, Latch, Persistence, Track, find_onset, noise_scale
from llds.errors import LLDSError

SEEDS = 200


def watch(rows, monitor=None, start=0):
    monitor = monitor or PhaseMonitor()
    return [event for step, row in enumerate(rows, start) for event in monitor.update(step, row)]


def alarms(events):
    return [event for event in events if event.kind == "alarm"]


# --- what is measured on runs of known truth; the thresholds were chosen on seeds from 1000 on


def test_the_onset_of_a_spiral_is_placed_within_ten_steps():
    near = 0
    for seed in range(SEEDS):
        run = synthetic.spiral(seed)
        first = next(iter(alarms(watch(run.rows))), None)
        near += first is not None and abs(first.onset - run.onset) <= 10
    assert near >= 0.9 * SEEDS


def test_healthy_runs_hardly_ever_alarm():
    kinds = {synthetic.healthy(seed).kind for seed in range(3)}
    assert kinds == {"sharpening", "reexploration", "small batch"}
    false = [seed for seed in range(SEEDS) if alarms(watch(synthetic.healthy(seed).rows))]
    assert len(false) < 0.02 * SEEDS


@pytest.mark.parametrize("kind", ["outage", "harder questions"])
def test_trouble_of_one_family_is_no_spiral(kind):
    false = [seed for seed in range(20) if alarms(watch(synthetic.HARD[kind](seed).rows))]
    assert len(false) <= 1


def test_the_phases_come_in_order_and_the_alarm_before_the_reward_is_gone():
    for seed in range(5):
        run = synthetic.spiral(seed)
        events = watch(run.rows)
        entered = {event.phase: event.step for event in reversed(events) if event.kind == "phase"}
        assert entered[1] < entered[2] < entered[3] or 0 in entered
        assert run.onset - 10 <= entered[2]
        assert abs(entered[3] - run.acceleration) <= 30
        first = alarms(events)[0]
        assert first.step < run.acceleration + 18, "the reward has halved by then"
        assert set(first.families) > {"likelihood"}
        assert first.criteria["correct_fall"]
        assert first.criteria["wrong_do_not_rise"]
        assert first.criteria["similar"] is None


def test_sharpening_is_told_apart_from_stagnation():
    events = watch(synthetic.sharpening(0).rows)
    assert {PHASES[event.phase] for event in events} <= {"rising", "I (stagnation)"}
    assert any(event.phase == 0 for event in events)


def test_strictly_on_policy_runs_are_judged_by_level_and_reward():
    found = 0
    for seed in range(10):
        run = synthetic.spiral(seed, per_rollout=1)
        first = next(iter(alarms(watch(run.rows))), None)
        found += first is not None
        if first:
            assert set(first.families) & {"reward", "behaviour"}
            assert first.criteria["correct_fall"] is None
    assert found >= 9


# --- what holds for any run


@pytest.mark.parametrize("make", [synthetic.spiral, synthetic.small_batch])
def test_nothing_depends_on_what_comes_later(make):
    rows = make(3).rows
    whole = watch(rows)
    for end in (1, 25, 90, 140, 222):
        assert watch(rows[:end]) == [event for event in whole if event.step < end]


@pytest.mark.parametrize("end", [0, 1, 19, 100, 130, 200])
def test_a_resumed_run_goes_on_identically(end):
    rows = synthetic.spiral(7).rows
    first = PhaseMonitor()
    events = watch(rows[:end], first)
    saved = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    second = PhaseMonitor()
    second.load_state_dict(saved)
    # Going on with the first must not reach into what was saved.
    first.update(end, rows[end])
    assert second.state_dict() == saved
    assert events + watch(rows[end:], second, end) == watch(rows)


def test_a_foreign_state_is_refused():
    saved = PhaseMonitor().state_dict()
    with pytest.raises(LLDSError, match="other settings"):
        PhaseMonitor(PhaseSettings(drift_on=4.0)).load_state_dict(saved)
    with pytest.raises(LLDSError, match="another version"):
        PhaseMonitor().load_state_dict({**saved, "version": 99})


def test_steps_must_rise():
    monitor = PhaseMonitor()
    monitor.update(4, {})
    with pytest.raises(LLDSError, match="step 4 after step 4"):
        monitor.update(4, {})


def test_settings_are_checked():
    with pytest.raises(LLDSError, match="drift_off must not be above"):
        PhaseSettings(drift_off=9.0)
    with pytest.raises(LLDSError, match="epsilon must be at least 0"):
        PhaseSettings(epsilon=-1e-3)


def test_log_keys_mean_the_same_as_names():
    rows = synthetic.spiral(2).rows
    measured = {"logprob_correct", "displacement_correct", "displacement_wrong", "updates_since_rollout"}
    keyed = [{f"llds/{k}" if k in measured else k: v for k, v in row.items()} for row in rows]
    assert watch(keyed) == watch(rows)


def test_an_offset_of_the_old_log_probs_is_no_displacement():
    def shifted(row):
        lost = row["displacement_correct"]
        return {**row, "displacement_correct": None if lost is None else lost + 0.01}

    for run in (synthetic.spiral(3), synthetic.reexploration(2)):
        plain, moved = (alarms(watch(rows)) for rows in (run.rows, map(shifted, run.rows)))
        assert [(event.step, event.onset) for event in plain] == [
            (event.step, event.onset) for event in moved
        ]


def test_displacement_alone_is_no_alarm():
    only = [
        {name: row[name] for name in ("displacement_correct", "updates_since_rollout")}
        for row in synthetic.spiral(1).rows
    ]
    monitor = PhaseMonitor()
    assert watch(only, monitor) == []
    assert monitor.onset is not None


@pytest.mark.parametrize("missing", ["entropy", "grad_norm", "reward", "searches", "logprob_correct"])
def test_any_one_series_of_a_second_family_may_be_absent(missing):
    rows = [{k: v for k, v in row.items() if k != missing} for row in synthetic.spiral(5).rows]
    assert alarms(watch(rows))


def test_recovery_is_told_and_a_second_decline_alarms_again():
    decline = synthetic.spiral(5).rows[:170]
    rng = random.Random(0)
    calm = [
        {
            "displacement_correct": rng.gauss(-1e-3, 1e-3),
            "updates_since_rollout": 1,
            "logprob_correct": rng.gauss(-0.2, 0.01),
            "entropy": rng.gauss(0.3, 0.01),
        }
        for _ in range(60)
    ]
    monitor = PhaseMonitor()
    events = watch(decline, monitor)
    assert alarms(events)
    after = watch(calm, monitor, len(decline))
    assert [event.kind for event in after if event.kind != "phase"] == ["recovered"]
    assert monitor.onset is None
    assert alarms(watch(decline[80:], monitor, 1000))


def test_similarity_of_the_probe_enters_the_criteria():
    rows = [{**row, "hidden_similarity": 0.9} for row in synthetic.spiral(0).rows]
    assert alarms(watch(rows))[0].criteria["similar"] is True


def test_events_are_plain_json():
    for event in watch(synthetic.spiral(0).rows):
        assert json.loads(json.dumps(event.as_dict(), allow_nan=False)) == event.as_dict()
        assert event.text.endswith(".")


odd = st.one_of(
    st.none(),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300, -1e300, "nan", True, 0, 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
)
NAMES = (
    "logprob_correct displacement_correct displacement_wrong updates_since_rollout entropy grad_norm reward "
    "exact_match searches action_tokens hidden_similarity other"
)
names = st.sampled_from(NAMES.split())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(names, odd), max_size=50))
def test_no_row_breaks_the_monitor(rows):
    monitor = PhaseMonitor()
    events = watch(rows, monitor)
    json.dumps([event.as_dict() for event in events], allow_nan=False)
    json.dumps(monitor.state_dict(), allow_nan=False)


# --- the statistics


def test_noise_is_seen_through_trends_jumps_and_outliers():
    rng = random.Random(1)
    for trend, jump, outliers in ((0.0, 0, 0.0), (0.05, 0, 0.0), (0.0, 9, 0.0), (0.0, 0, 0.15)):
        values = [
            rng.gauss(0, 1) + trend * i + jump * (i > 100) + (100 if rng.random() < outliers else 0)
            for i in range(400)
        ]
        assert 0.8 < noise_scale(values) < 1.5
    assert noise_scale([]) == noise_scale([3.0]) == 0.0


def test_an_onset_is_the_best_fit_to_a_jump_and_a_bend():
    rng = random.Random(2)
    jump = Track([*range(60)], [rng.gauss(i >= 30, 0.7) for i in range(60)])
    bend = Track([*range(60)], [rng.gauss(-0.2 * max(0, i - 30), 0.7) for i in range(60)])
    alone = find_onset(jump, Track())
    noise = noise_scale(jump.values)
    low, high = (statistics.median(jump.values) + side * noise for side in (-3, 3))
    clipped = [min(high, max(low, value)) for value in jump.values]

    def cost(split):
        parts = clipped[:split], clipped[split:]
        return sum(sum((v - sum(p) / len(p)) ** 2 for v in p) for p in parts)

    assert alone == min(range(3, 57), key=cost)
    for pair in ((jump, bend), (Track(), bend)):
        assert abs(find_onset(*pair) - 30) <= 4


def test_where_nothing_declines_there_is_no_onset():
    falling, rising = (
        Track([*range(20)], [-float(i) for i in range(20)]),
        Track([*range(20)], [*map(float, range(20))]),
    )
    assert find_onset(falling, rising) is None
    assert find_onset(Track(), Track()) is None
    assert find_onset(Track([1, 2], [0.0, 1.0]), Track()) is None


def test_a_drift_follows_improvement_and_measures_from_the_best():
    drift = Drift(bad=-1, least=0.0)
    rng = random.Random(3)
    levels = [0.0] * 30 + [5.0] * 30 + [2.0] * 20
    distances = [drift.update(rng.gauss(level, 0.5)) for level in levels]
    assert distances[:19] == [None] * 19
    assert max(d for d in distances[19:60]) < 3.5
    assert distances[-1] == pytest.approx(6, abs=1.5)
    assert drift.update(None) is None


def test_a_drift_smaller_than_the_least_is_none():
    drift = Drift(bad=+1, least=0.5)
    values = [0.0, 0.01] * 20 + [0.3] * 10
    assert max(drift.update(value) or 0 for value in values) == 0
    assert max(drift.update(1.0) or 0 for _ in range(10)) > 0


def test_persistence_forgets_single_outliers_and_comes_down_again():
    rng = random.Random(4)
    watched = Persistence(above=0.0)
    quiet = [rng.gauss(-0.5, 1) for _ in range(100)]
    quiet[50] = 1e6
    assert max(watched.update(step, value) or 0 for step, value in enumerate(quiet)) < 9
    lasting = [watched.update(100 + step, rng.gauss(2, 1)) for step in range(40)]
    assert max(lasting) == watched.cap
    relaxed = [watched.update(140 + step, rng.gauss(-1, 1)) for step in range(40)]
    assert relaxed[-1] == 0


def test_acceleration_needs_a_doubling_beyond_the_noise():
    rng = random.Random(5)
    steady, faster = Persistence(above=1e-4), Persistence(above=1e-4)
    for step in range(60):
        noise = rng.gauss(0, 1e-3)
        steady.update(step, 2e-3 + noise)
        faster.update(step, 2e-3 * (1 if step < 45 else 4) + noise)
    assert not steady.accelerates(0)
    assert faster.accelerates(0)
    assert not faster.accelerates(50), "too few values since then"


def test_a_latch_has_hysteresis():
    latch = Latch(high=3, low=1, patience=2)
    states = [latch.update(v) for v in (0, 2.9, 3, 2, 0.5, 1.5, 0.5, None, 0.5, 2.9)]
    assert states == [False, False, True, True, True, True, True, True, False, False]


def test_synthetic_runs_are_the_same_every_time():
    for make in (synthetic.spiral, *synthetic.HEALTHY.values(), *synthetic.HARD.values()):
        assert make(4) == make(4)
        assert make(4).rows != make(5).rows


def starving(rewards, signal=0.0):
    """Rows of a run whose groups give no signal after the first two steps."""
    counts = [4.0, 4.0, *[signal] * (len(rewards) - 2)]
    return [
        {"exact_match": reward, "responses_correct": count, "responses_wrong": count}
        for reward, count in zip(rewards, counts, strict=True)
    ]


def test_a_run_that_dies_at_once_is_told_to_be_dead_once():
    events = watch(starving([0.25, 0.2, *[0.0] * 60]))
    (alarm,) = alarms(events)
    assert (alarm.step, alarm.onset, alarm.severity) == (21, 2, "critical")
    assert alarm.families == ("entropy-gradient", "reward")
    assert "the run is dead" in alarm.text
    assert "0.25 to 0" in alarm.text


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ([0.25, 0.5, *[1.0] * 60], 0.0),  # every question is solved
        ([0.0] * 62, 0.0),  # it never had a reward: nothing fell
        ([0.25, 0.2, *[0.0] * 60], 1.0),  # there is a signal still
        ([0.25, 0.2, *[0.0] * 15], 0.0),  # not for long enough
    ],
)
def test_a_run_without_signal_is_not_dead_while_its_reward_holds(rewards, signal):
    assert not alarms(watch(starving(rewards, signal)))
