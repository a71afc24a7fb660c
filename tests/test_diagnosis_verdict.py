"""Verdicts: real logs get their truth, made-up ones theirs, and nothing depends on what comes later."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llds.diagnosis import synthetic
from llds.diagnosis.advice import advice_for
from llds.diagnosis.findings import CLASSES, SEVERITIES
from llds.diagnosis.reading import read_logs
from llds.diagnosis.signals import RULES
from llds.diagnosis.statistics import follow, jumps, onset_of, running_median, running_noise
from llds.diagnosis.table import Column, Table
from llds.diagnosis.verdict import diagnose
from llds.diagnosis.watch import Watcher, lead_of, replay
from llds.dynamics.synthetic import sharpening
from llds.dynamics.synthetic import spiral as likelihood_spiral
from log_shapes import LOGS


def table_of(columns, steps=None, decimals=None, engine="verl"):
    length = len(next(iter(columns.values())))
    steps = np.arange(1, length + 1) if steps is None else np.asarray(steps)
    made = {}
    for name, values in columns.items():
        values = np.asarray(values, dtype=float)
        made[name] = Column(name, name, values, np.zeros(length, dtype=bool), decimals)
    return Table(steps.astype(np.int64), made, "console", engine)


def kinds(diagnosis, *severities):
    return [one.kind for one in diagnosis.findings if one.severity in (severities or SEVERITIES)]


# --- real logs


def test_tools_given_up_then_collapse():
    """Turns 5.9 -> 4.7 by step 18 -> 2.0 by 39; the gradient surges only from 36 on."""
    diagnosis = diagnose(read_logs([LOGS / "verl_collapse_tools.log"]))
    assert (diagnosis.verdict, diagnosis.severity) == ("tool-abandonment", "critical")
    assert 3 <= diagnosis.onset_step <= 18
    assert diagnosis.first_signal.series == "turns"
    assert diagnosis.first_signal.step <= 36 - 13
    gradient = next(s for s in diagnosis.findings[0].signals if s.series == "grad_norm")
    assert 34 <= gradient.step <= 38
    assert diagnosis.findings[0].lead_steps >= 13
    assert "spiral-phase-2" in [one.kind for one in diagnosis.missing]


def test_a_collapse_within_twelve_steps():
    """Turns 7.7 -> 2.1 by step 9, length 1,922 -> 1 by 12, dead after."""
    diagnosis = diagnose(read_logs([LOGS / "verl_collapse_fast.log.gz"]))
    assert (diagnosis.verdict, diagnosis.severity) == ("tool-abandonment", "critical")
    assert 2 <= diagnosis.onset_step <= 5
    dead = next(one for one in diagnosis.findings if one.kind == "dead")
    assert 10 <= dead.onset_step <= 15
    assert "length-shrink" in kinds(diagnosis, "critical")


def test_an_entropy_hump_is_healthy():
    diagnosis = diagnose(read_logs([LOGS / "verl_entropy_hump.log"]))
    assert diagnosis.verdict == "healthy"
    assert kinds(diagnosis, "warning", "critical") == []
    reasons = {one.kind: one.why for one in diagnosis.ruled_out}
    assert "exploration" in reasons["entropy-explosion"]


def test_nine_rows_are_too_few():
    diagnosis = diagnose(read_logs([LOGS / "verl_old_nine_steps.log"]))
    assert (diagnosis.verdict, diagnosis.severity) == ("not-enough-data", "info")
    assert "The log rounds its numbers" in " ".join(diagnosis.notes)


def test_a_noisy_tiny_batch_is_nothing_above_info():
    diagnosis = diagnose(read_logs([LOGS / "trainer_state.json"]))
    assert diagnosis.verdict == "healthy"
    assert kinds(diagnosis, "warning", "critical") == []


# --- made-up logs


@pytest.mark.parametrize("kind", synthetic.HEALTHY)
def test_healthy_logs_are_never_critical(kind):
    found = [diagnose(synthetic.HEALTHY[kind](seed).table) for seed in range(20)]
    assert [one.verdict for one in found if one.severity == "critical"] == []
    assert sum(one.severity == "warning" for one in found) <= 2


@pytest.mark.parametrize(
    ("kind", "named", "near"),
    [
        ("tool-abandonment", 19, 15),
        ("outage", 15, 15),
        ("length-shrink", 17, 15),
        ("length-growth", 18, 13),
        ("entropy-explosion", 19, 17),
        ("spiral-phase-3", 19, 17),
        ("nan", 20, 20),
        ("dead", 17, 17),
    ],
)
def test_sick_logs_are_named_with_their_onset(kind, named, near):
    right, close = 0, 0
    for seed in range(20):
        made = synthetic.SICK[kind](seed)
        diagnosis = diagnose(made.table)
        if diagnosis.verdict == kind:
            right += 1
            close += abs(diagnosis.onset_step - made.onset) <= 5 * int(made.table.steps[0])
    assert right >= named
    assert close >= near


def test_likelihood_is_judged_by_the_monitor_of_a_live_run():
    run = likelihood_spiral(3)
    names = dict.fromkeys(name for row in run.rows for name in row)
    rows = {name: [math.nan if row.get(name) is None else row[name] for row in run.rows] for name in names}
    diagnosis = diagnose(table_of(rows, engine="llds"))
    assert diagnosis.verdict.startswith("spiral-phase")
    assert diagnosis.severity == "critical"
    assert abs(diagnosis.onset_step - (run.onset + 1)) <= 10
    assert "on_alarm" in " ".join(diagnosis.findings[0].advice)
    healthy = sharpening(1)
    rows = {
        name: [math.nan if row.get(name) is None else row[name] for row in healthy.rows] for name in names
    }
    assert diagnose(table_of(rows, engine="llds")).severity in {"ok", "info"}


# --- rules


def steady(length=60, **changes):
    rng = np.random.default_rng(0)
    base = {"reward": 0.5, "grad_norm": 0.5, "entropy": 0.4, "response_tokens": 500.0, "turns": 4.0}
    columns = {name: value * (1 + 0.02 * rng.standard_normal(length)) for name, value in base.items()}
    return columns | changes


def test_nan_is_named_by_its_first_key_and_needs_no_twenty_rows():
    values = np.full(12, 0.5)
    values[6:] = np.nan
    table = table_of(steady(12))
    table.columns["grad_norm"] = Column("grad_norm", "actor/grad_norm", values, np.isnan(values))
    diagnosis = diagnose(table)
    assert (diagnosis.verdict, diagnosis.severity, diagnosis.onset_step) == ("nan", "critical", 7)
    assert "actor/grad_norm was not finite" in diagnosis.findings[0].title
    assert "no precursor" in diagnosis.findings[0].explanation


def test_a_single_nan_that_comes_back_is_worth_a_word():
    table = table_of(steady())
    values = table.columns["grad_norm"].values.copy()
    values[20] = math.inf
    table.columns["grad_norm"] = Column("grad_norm", "grad_norm", values, ~np.isfinite(values))
    diagnosis = diagnose(table)
    assert (diagnosis.verdict, kinds(diagnosis)) == ("healthy", ["nan"])


def test_a_no_op_is_exactly_zero_at_full_precision():
    zeros = {"kl_old": np.zeros(60), "clip_share": np.zeros(60)}
    diagnosis = diagnose(table_of(steady(**zeros), engine="trl"))
    assert (diagnosis.verdict, diagnosis.severity) == ("no-op", "info")
    assert "num_iterations=2" in diagnosis.findings[0].advice[0]
    rounded = diagnose(table_of(steady(**zeros), decimals=3))
    assert rounded.verdict == "healthy"
    assert "may be small instead of none" in next(
        one.sentence for one in rounded.missing if one.kind == "no-op"
    )
    moving = diagnose(table_of(steady(**zeros | {"kl_old": np.full(60, 1e-9)})))
    assert "no-op" in [one.kind for one in moving.ruled_out]
    llds = diagnose(table_of(steady(structural_zero=np.ones(60), llds_loss=np.zeros(60))))
    assert (llds.verdict, llds.severity) == ("no-op", "warning")


def test_a_dead_retriever_is_no_fault_of_the_policy():
    columns = steady(generation_seconds=np.full(60, 30.0))
    columns["reward"][30:] -= 0.3
    columns["response_tokens"][30:] *= 0.5
    columns["generation_seconds"][30:] = 90.0
    diagnosis = diagnose(table_of(columns))
    assert (diagnosis.verdict, diagnosis.severity, diagnosis.onset_step) == ("outage", "critical", 31)
    assert "retry" in diagnosis.findings[0].advice[0]
    columns["reward"][45:] += 0.3
    recovered = diagnose(table_of(columns))
    assert (recovered.verdict, recovered.severity) == ("outage", "warning")
    assert "came back" in recovered.findings[0].signals[0].evidence


def test_fewer_tools_with_a_rising_reward_are_no_abandonment():
    columns = steady(100)
    columns["turns"] = np.linspace(6, 2.2, 100)
    columns["reward"] = np.linspace(0.2, 0.8, 100) + 0.01 * np.random.default_rng(1).standard_normal(100)
    diagnosis = diagnose(table_of(columns))
    assert diagnosis.severity in {"ok", "info"}


def test_missing_columns_are_named_and_nothing_is_guessed():
    diagnosis = diagnose(table_of({"reward": steady()["reward"]}))
    assert diagnosis.verdict == "healthy"
    sentences = {one.kind: one.sentence for one in diagnosis.missing}
    assert sentences["tool-abandonment"] == "no turn counts in this log, so abandonment cannot be told"
    assert {"dead", "length-shrink", "length-growth", "entropy-explosion", "no-op"} <= sentences.keys()


def test_critical_needs_two_families():
    for make in synthetic.SICK.values():
        for seed in range(5):
            for finding in diagnose(make(seed).table).findings:
                families = {signal.family for signal in finding.signals}
                if finding.severity == "critical" and finding.kind != "nan":
                    assert len(families) >= 2, finding


# --- nothing depends on what comes later


@pytest.mark.parametrize("file", ["verl_collapse_tools.log", "verl_collapse_fast.log.gz"])
def test_watching_says_at_each_row_what_diagnosing_says(file):
    table = read_logs([LOGS / file]).head(60)
    changes = {change.step: change for change in replay(table)}
    before = ("none", "none")
    for rows in range(1, 60):
        now = diagnose(table.head(rows))
        step = int(table.steps[rows - 1])
        assert ((now.verdict, now.severity) != before) == (step in changes)
        before = (now.verdict, now.severity)


def test_watching_tells_before_the_trouble_is_visible():
    lead = lead_of(read_logs([LOGS / "verl_collapse_tools.log"]))
    assert lead.alarm_kind == "tool-abandonment"
    assert lead.steps >= 10
    # No verdict under twenty rows: here the reward is gone before.
    assert lead_of(read_logs([LOGS / "verl_collapse_fast.log.gz"]).head(40)).steps < 0
    assert lead_of(read_logs([LOGS / "verl_entropy_hump.log"]).head(120)).alarm_step is None


def test_a_watcher_goes_on_where_it_was():
    table = read_logs([LOGS / "verl_collapse_tools.log"])
    watcher = Watcher()
    told = [change for rows in (10, 10, 30, 59) for change in watcher.look(table.head(rows))]
    assert [(c.step, c.diagnosis.verdict) for c in told] == [
        (c.step, c.diagnosis.verdict) for c in replay(table)
    ]


@pytest.mark.parametrize("name", RULES)
def test_signals_are_causal(name):
    rng = np.random.default_rng(3)
    values = np.abs(np.concatenate([rng.normal(3, 0.1, 40), rng.normal(1, 0.1, 40), rng.normal(9, 0.1, 40)]))
    whole = follow(RULES[name], values).on
    for rows in range(1, 120, 7):
        assert follow(RULES[name], values[:rows]).on.tolist() == whole[:rows].tolist()


# --- invariances


@given(scale=st.floats(0.1, 50), offset=st.integers(0, 10_000), every=st.sampled_from([1, 5, 10]))
@settings(max_examples=12, deadline=None)
def test_units_of_length_and_numbers_of_steps_do_not_matter(scale, offset, every):
    table = read_logs([LOGS / "verl_collapse_tools.log"])
    columns = dict(table.columns)
    for name in ("response_tokens", "grad_norm", "generation_seconds"):
        old = columns[name]
        columns[name] = Column(name, old.key, old.values * scale, old.unreadable)
    steps = offset + table.steps * every
    diagnosis = diagnose(Table(steps, columns, "console", "verl"))
    original = diagnose(table)
    assert (diagnosis.verdict, diagnosis.severity) == (original.verdict, original.severity)
    assert diagnosis.onset_step == offset + original.onset_step * every


@given(
    data=st.dictionaries(
        st.sampled_from(["reward", "turns", "response_tokens", "entropy", "grad_norm", "kl_old", "clip_share", "x",
                         "truncated", "generation_seconds", "logprob_correct", "displacement_correct"]),
        st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=40, max_size=40),
        min_size=1,
    ),
    rows=st.integers(0, 40),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
@pytest.mark.filterwarnings("error")
def test_any_table_has_a_verdict(data, rows):
    columns = {}
    for name, values in data.items():
        array = np.array(values[:rows], dtype=float)
        columns[name] = Column(name, name, array, np.isinf(array))
    diagnosis = diagnose(Table(np.arange(1, rows + 1), columns, "jsonl", "unknown"))
    assert diagnosis.verdict in CLASSES
    assert diagnosis.severity in SEVERITIES
    assert all(0 <= one.confidence <= 1 for one in diagnosis.findings)


# --- statistics


def test_noise_is_seen_through_a_trend_and_a_jump():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.5, 400)
    assert running_noise(noise)[-1] == pytest.approx(0.5, rel=0.35)
    assert running_noise(noise + np.linspace(0, 20, 400))[-1] == pytest.approx(0.5, rel=0.35)
    assert running_noise(np.where(np.arange(400) > 380, noise + 50, noise))[-1] == pytest.approx(
        0.5, rel=0.35
    )


def test_running_median_of_few_values():
    assert running_median(np.array([3.0, 1.0, 2.0, 9.0]), 3).tolist() == [3.0, 2.0, 2.0, 2.0]
    assert running_median(np.array([]), 3).tolist() == []


def test_an_onset_is_where_the_descent_begins():
    rng = np.random.default_rng(0)
    values = 4 + 0.05 * rng.standard_normal(120)
    values[60:90] -= np.linspace(0, 3, 30)
    values[90:] -= 3
    track = follow(RULES["turns down"], values)
    onset, low, high = onset_of(track)
    assert low <= onset <= high
    assert abs(onset - 62) <= 3


def test_jumps_are_steps_and_not_slopes():
    rng = np.random.default_rng(0)
    flat = 1 + 0.02 * rng.standard_normal(60)
    step = np.where(np.arange(60) >= 30, flat - 0.5, flat)
    assert [jump.place for jump in jumps(step, -1)] == [30]
    assert jumps(flat, -1) == []
    slope = flat - np.linspace(0, 0.8, 60)
    assert jumps(slope, -1) == []


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("engine", ["verl", "trl", "ms-swift", "llds", "unknown", "another"])
def test_there_is_advice_for_every_class_and_engine(kind, engine):
    advice = advice_for(kind, engine)
    assert all(isinstance(line, str) and line for line in advice)
    assert bool(advice) == (kind != "healthy")
