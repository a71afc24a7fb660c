"""What stored runs say: collapse, phases, how they stand against each other, and which signal came first.

Definitions, all on means over ten rollouts (``LEVEL``):

- *start*: mean reward of the first ten rollouts; *final*: of the last ten; *best*: the highest in between.
- *collapsed*: from some rollout to the end the mean stays below a quarter of the best. *Faded*: not collapsed,
  but final below three quarters of the start. *Dipped*: neither, but once below two thirds of the best so far.
  *Held*: all others.
- *drop*: the rollout from which on the mean stays below half of the best; only in collapsed runs.
- *gradual*: collapsed, and at the drop searches and tokens per response are still within a third of what they
  were at the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

from llds.dynamics import Event, PhaseMonitor
from llds.dynamics.detectors import noise_scale
from llds.evaluation.statistics import Estimate, bootstrap_mean, wilson
from llds.lab.loop import monitored
from llds.lab.series import StoredRun

Floats = NDArray[np.float64]

#: Rollouts that a level is the mean of.
LEVEL = 10


def levels(values: Floats, width: int = LEVEL) -> Floats:
    """Return the trailing mean over ``width`` values that are there, NaN without any: [n]."""
    parts = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return np.array([part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts])


@dataclass(frozen=True)
class Verdict:
    """What became of one run; see the module. Rollouts are counted from 0; None: it did not happen.

    ``onset``, ``phase_two``, ``phase_three``, ``alarm`` (of any severity), ``critical`` (the first critical one):
    what the phase monitor says of the stored series.
    ``kept``: searches and tokens per response at the drop, as shares of those at the start.
    """

    seed: int
    start: float
    best: float
    final: float
    fate: str
    drop: int | None
    is_gradual: bool
    kept: tuple[float, float] | None
    onset: int | None
    phase_two: int | None
    phase_three: int | None
    alarm: int | None
    critical: int | None
    displacement: float | None
    searches: float
    cpu_seconds: float


def replay(run: StoredRun) -> list[Event]:
    """Show the phase monitor the stored rollouts one by one, and return what it says; steps are rollouts."""
    monitor = PhaseMonitor()
    events = []
    for rollout in range(len(run["reward"])):
        row = {name: float(values[rollout]) for name, values in run.columns.items()}
        events += monitor.update(rollout, monitored(row, run.updates))
    return events


@cache
def judge(run: StoredRun) -> Verdict:
    """Say what became of a run."""
    reward = run["reward"]
    level = levels(reward)
    start, best, final = float(reward[:LEVEL].mean()), float(level[LEVEL - 1 :].max()), float(level[-1])
    collapse = _stays_below(level, best / 4)
    drop = _stays_below(level, best / 2) if collapse is not None else None
    full = level[LEVEL - 1 :]
    has_dipped = bool((full < 2 / 3 * np.maximum.accumulate(full)).any())
    fate = (
        "collapsed" if collapse is not None
        else "faded" if final < 0.75 * start
        else "dipped" if has_dipped
        else "held"
    )  # fmt: skip
    kept = None
    if drop is not None:
        searches, tokens = (levels(run[name], 5) for name in ("searches", "action_tokens"))
        kept = (
            float(searches[drop] / run["searches"][:LEVEL].mean()),
            float(tokens[drop] / run["action_tokens"][:LEVEL].mean()),
        )
    events = replay(run)
    alarms = [event for event in events if event.kind == "alarm"]
    alarm = alarms[0] if alarms else None
    lost = run["displacement_correct"]
    return Verdict(
        run.seed,
        start,
        best,
        final,
        fate,
        drop,
        kept is not None and all(abs(share - 1) <= 1 / 3 for share in kept),
        kept,
        alarm.onset if alarm else None,
        _first_phase(events, 2),
        _first_phase(events, 3),
        alarm.step if alarm else None,
        next((event.step for event in alarms if event.severity == "critical"), None),
        float(np.nanmean(lost)) if np.isfinite(lost).any() else None,
        float(run["searches"][-LEVEL:].mean()),
        run.cpu_seconds,
    )


#: Windows of ten rollouts in a collapsed run, and where each begins.
WINDOWS = ("start", "around the best", "before the drop", "after the drop")


def windows(run: StoredRun, name: str) -> dict[str, float]:
    """Return the mean of a series over each of :data:`WINDOWS` of a collapsed run, NaN where it has no value."""
    level = levels(run["reward"])
    best = int(level[LEVEL - 1 :].argmax())
    drop = judge(run).drop or 0
    begins = (0, best, max(0, drop - LEVEL), drop)
    parts = [run[name][begin : begin + LEVEL] for begin in begins]
    means = [float(part[np.isfinite(part)].mean()) if np.isfinite(part).any() else np.nan for part in parts]
    return dict(zip(WINDOWS, means, strict=True))


def _stays_below(level: Floats, bound: float) -> int | None:
    """Return the first place from which on ``level`` is below ``bound``; None if its end is not."""
    above = np.flatnonzero(~(level < bound))
    first = int(above[-1]) + 1 if len(above) else 0
    return first if first < len(level) else None


def _first_phase(events: Sequence[Event], phase: int) -> int | None:
    return next((event.step for event in events if event.phase >= phase), None)


@dataclass(frozen=True)
class Summary:
    """What an arm did in a regime, over its seeds; rollouts are medians over the runs in which it happened."""

    runs: int
    start: Estimate
    best: Estimate
    final: Estimate
    collapsed: Estimate
    faded: int
    dipped: int
    gradual: int
    drop: float | None
    phase_two: float | None
    phase_three: float | None
    displacement: float | None
    searches: float
    cpu_seconds: float


def summarise(runs: Sequence[StoredRun]) -> Summary:
    """Put the runs of one arm together; intervals cover 95 %, by bootstrap over seeds or Wilson's score."""
    verdicts = [judge(run) for run in runs]
    fates = [verdict.fate for verdict in verdicts]

    def middle(name: str) -> float | None:
        found = [value for verdict in verdicts if (value := getattr(verdict, name)) is not None]
        return float(median(found)) if found else None

    return Summary(
        len(runs),
        bootstrap_mean([verdict.start for verdict in verdicts]),
        bootstrap_mean([verdict.best for verdict in verdicts]),
        bootstrap_mean([verdict.final for verdict in verdicts]),
        wilson(fates.count("collapsed"), len(fates)),
        fates.count("faded"),
        fates.count("dipped"),
        sum(verdict.is_gradual for verdict in verdicts),
        middle("drop"),
        middle("phase_two"),
        middle("phase_three"),
        middle("displacement"),
        float(np.mean([verdict.searches for verdict in verdicts])),
        float(np.mean([verdict.cpu_seconds for verdict in verdicts])),
    )


def paired(first: Sequence[StoredRun], second: Sequence[StoredRun]) -> Estimate | None:
    """Return the mean difference in final reward, second − first, over the seeds that both have."""
    finals = [{run.seed: judge(run).final for run in runs} for runs in (first, second)]
    seeds = sorted(finals[0].keys() & finals[1].keys())
    return bootstrap_mean([finals[1][seed] - finals[0][seed] for seed in seeds]) if seeds else None


# --- which signal comes first

#: Name -> the series it looks at, and +1 where rising is bad, −1 where falling is.
SIGNALS: Mapping[str, tuple[str, int]] = {
    "displacement of correct": ("displacement_correct", +1),
    "displaced actions (LLD)": ("lld_actions_correct", +1),
    "log-prob of correct": ("logprob_correct", -1),
    "log-prob of wrong": ("logprob_wrong", -1),
    "entropy": ("policy_entropy", +1),
    "gradient norm": ("grad_norm", +1),
    "KL to the start": ("kl", +1),
    "ratio spikes": ("ratio_spikes", +1),
    "NLL after feedback": ("nll_round_1", +1),
    "searches": ("searches", -1),
    "malformed searches": ("malformed", +1),
    "reward": ("reward", -1),
}
#: Rollouts that the statistic needs before it speaks, and the width of its level.
_WARMUP, _WIDTH = 8, 5


def statistic(values: Floats, bad: int) -> Floats:
    """Return how far a series has moved from its best level so far, in units of its noise so far: [n].

    The level is a trailing mean of five. Online: what is said at a rollout depends on nothing later. One rule
    for all signals, so that none is favoured. 0 during warm-up and where the series has no value.
    """
    level = bad * levels(values, _WIDTH)
    moved = np.zeros(len(values))
    for now in range(_WARMUP, len(values)):
        past = level[_WIDTH - 1 : now + 1]
        noise = noise_scale(values[: now + 1][np.isfinite(values[: now + 1])].tolist())
        if np.isfinite(values[now]) and np.isfinite(past).any():
            moved[now] = (level[now] - np.nanmin(past)) / max(noise, 1e-9)
    return moved


@dataclass(frozen=True)
class Roc:
    """How one signal does. ``points``: (false alarms, alarms in time) as shares, by falling threshold.

    In time: before the drop of a collapsed run. False: anywhere in a run that held. ``area``: under the curve.
    ``even``: the same area with even exposure, over all pairs of a collapsed run and one that held: how often the
    statistic went higher before the drop of the first than in as many rollouts of the second, a tie counting half.
    ``lead``: rollouts from alarm to drop, the median over the collapsed runs at the threshold with at most one
    false alarm in ten (missed runs count as 0). ``caught``: the share in time there.
    """

    signal: str
    points: tuple[tuple[float, float], ...]
    area: float
    even: float
    lead: float
    caught: float


def roc(signal: str, collapsed: Sequence[StoredRun], held: Sequence[StoredRun]) -> Roc:
    """Return the ROC of a signal for "this run is going to lose half of its reward"."""
    series, bad = SIGNALS[signal]
    moved = [(statistic(run[series], bad), judge(run).drop or 0) for run in collapsed]
    peaks_before = np.array([values[:drop].max(initial=0.0) for values, drop in moved])
    held_moved = [statistic(run[series], bad) for run in held]
    peaks_held = np.array([values.max() for values in held_moved])
    thresholds = np.unique(np.concatenate([peaks_before, peaks_held, [0.0]]))[::-1]
    points = [(0.0, 0.0)]
    points += [(float((peaks_held >= t).mean()), float((peaks_before >= t).mean())) for t in thresholds]
    x, y = np.array(points).T
    bound = float(np.quantile(peaks_held, 0.9, method="higher"))
    leads = [_lead(values, drop, bound) for values, drop in moved]
    return Roc(
        signal,
        tuple(points),
        float(np.trapezoid(y, x)),
        _even_area(moved, held_moved),
        float(median(leads)),
        float(np.mean([lead > 0 for lead in leads])),
    )


def _even_area(collapsed: Sequence[tuple[Floats, int]], held: Sequence[Floats]) -> float:
    """Return the area under the ROC where each pair of runs is watched equally long; see ``Roc.even``."""
    wins = [
        np.sign(values[:drop].max(initial=0.0) - other[:drop].max(initial=0.0))
        for values, drop in collapsed
        for other in held
    ]
    return float((1 + np.mean(wins)) / 2)


def _lead(values: Floats, drop: int, bound: float) -> int:
    """Return how many rollouts before ``drop`` the statistic first exceeded ``bound``; 0 if it did not."""
    over = np.flatnonzero(values[:drop] > bound)
    return drop - int(over[0]) if len(over) else 0


def monitor_point(
    collapsed: Sequence[StoredRun], held: Sequence[StoredRun], which: str = "alarm"
) -> tuple[float, float, float]:
    """Return false alarms, alarms in time, and the median lead in rollouts, of the phase monitor.

    ``which``: "alarm" counts every alarm, "critical" only those.
    """
    false = [getattr(judge(run), which) is not None for run in held]
    leads = []
    for run in collapsed:
        told, drop = getattr(judge(run), which), judge(run).drop or 0
        leads.append(drop - told if told is not None and told < drop else 0)
    return float(np.mean(false)), float(np.mean([lead > 0 for lead in leads])), float(median(leads))
