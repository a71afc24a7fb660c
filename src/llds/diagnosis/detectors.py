"""One function per class: from the signals of a log to a finding, or to why it was not that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from llds.diagnosis.advice import advice_for
from llds.diagnosis.findings import Family, Finding, Missing, Ruled, Severity, Signal
from llds.diagnosis.signals import Signals
from llds.diagnosis.statistics import Bools, Floats, jumps, running_median
from llds.dynamics import LOG_PREFIX, PhaseMonitor

Told = Finding | Ruled | Missing
#: Fewest rows for a verdict; NaN, outage and dead are told earlier.
LEAST_ROWS = 20

_HARM = ("reward down", "validation down")


def _finding(
    signals: Signals,
    kind: str,
    severity: Severity,
    title: str,
    names: Sequence[str],
    explanation: str,
    *,
    extra: Sequence[Signal] = (),
) -> Finding:
    """Make a finding of the signals that came on; its onset is that of the first of ``names``."""
    onset = signals.onset(names[0])
    evidence = sorted([*(signals.describe(name) for name in names), *extra], key=lambda signal: signal.step)
    families = {signal.family for signal in evidence}
    return Finding(
        kind=kind,
        severity=severity,
        title=title,
        onset_step=signals.step(onset[0]),
        onset_interval=(signals.step(onset[1]), signals.step(onset[2])),
        signals=tuple(evidence),
        lead_steps=_lead(signals, evidence),
        confidence=confidence(len(families), all(signals.holds(name) for name in names)),
        explanation=explanation,
        advice=advice_for(kind, signals.table.engine),
    )


def confidence(families: int, lasts: bool) -> float:
    """Return how sure a finding is: 0.5 for one family, 0.15 more for each further one up to three, 0.1 more if
    all of it is still there at the end, and never above 0.95.
    """
    return round(min(0.95, 0.5 + 0.15 * min(families - 1, 3) + 0.1 * lasts), 2)


def _lead(signals: Signals, evidence: Sequence[Signal]) -> int | None:
    """Return the steps from the first signal to the visible trouble: reward falls or gradient surges."""
    visible = [
        signals.step(signals.onset(name)[0])
        for name in ("reward down", "gradient up")
        if signals.is_on(name) and _is_trouble(signals, name)
    ]
    return None if not visible or not evidence else max(0, min(visible) - evidence[0].step)


def _is_trouble(signals: Signals, name: str) -> bool:
    """A gradient that surged counts where it stayed for a while; a reward that fell always does."""
    track = signals.tracks[name]
    return name != "gradient up" or (track.first is not None and track.share_on(track.first) > 0.3)


def _present(signals: Signals, *series: str) -> list[str]:
    return [name for name in series if name in signals.table.columns]


def _needs(signals: Signals, kind: str, *series: str) -> Missing | None:
    """Say that a class can't be told where none of ``series`` is in the log."""
    if _present(signals, *series):
        return None
    words = " or ".join(name.replace("_", " ") for name in series)
    sentence = f"no {words} in this log, so {kind.replace('-', ' ')} cannot be told"
    return Missing(kind, series, sentence)


def _on(signals: Signals, *names: str) -> list[str]:
    return [name for name in names if signals.is_on(name)]


def _harm(signals: Signals) -> list[str]:
    """The signals that say that the run got worse at its task, and did not recover."""
    return [name for name in _on(signals, *_HARM) if signals.holds(name)]


# --- numbers


def nan(signals: Signals) -> list[Told]:
    """A number that is not finite: the first key, and whether it came back."""
    first: tuple[int, str] | None = None
    lasting = False
    for name, column in signals.table.columns.items():
        rows = np.flatnonzero(column.unreadable)
        if not rows.size or name in {"validation"}:
            continue
        if first is None or (int(rows[0]), name) < first:
            first = (int(rows[0]), name)
        later = np.isfinite(column.values[rows[-1] + 1 :]).any()
        lasting |= not later and rows.size >= min(3, len(column.values) - int(rows[0]))
    if first is None:
        return [Ruled("nan", "every number in the log is finite")]
    row, name = first
    key = signals.table.columns[name].key
    value = float(signals.table.columns[name].values[row])
    signal = Signal(
        name,
        "numbers",
        signals.step(row),
        "nan",
        math.nan,
        value,
        f"{key} is {value} at step {signals.step(row)}",
    )
    words = "and stayed so" if lasting else "and came back to finite numbers"
    return [
        Finding(
            kind="nan",
            severity="critical" if lasting else "info",
            title=f"{key} was not finite",
            onset_step=signals.step(row),
            onset_interval=(signals.step(row), signals.step(row)),
            signals=(signal,),
            lead_steps=None,
            confidence=0.95 if lasting else 0.6,
            explanation=f"{key} was the first to become {value} {words}. Most such deaths have no precursor.",
            advice=advice_for("nan", signals.table.engine) if lasting else (),
        )
    ]


def no_op(signals: Signals) -> list[Told]:
    """Old and new policy are the same: ratio and clip are exactly at rest in every row."""
    table = signals.table
    structural = table.values("structural_zero")
    has_llds = any(name.startswith("llds_") or name == "structural_zero" for name in table.columns)
    if structural is not None and np.isfinite(structural).sum() >= 5:
        if bool((structural[np.isfinite(structural)] == 1).all()):
            return [_no_op(signals, "llds/structural_zero is 1 in every row", has_llds)]
        return [Ruled("no-op", "LLDS could act in some of the steps")]
    columns = [table.columns[name] for name in ("kl_old", "clip_share") if name in table.columns]
    if len(columns) < 2:
        return [
            Missing(
                "no-op",
                ("kl_old", "clip_share"),
                "no KL to the old policy beside the clipped share in this log, so a no-op cannot be told",
            )
        ]
    if any(column.decimals is not None for column in columns):
        return [
            Missing("no-op", ("kl_old",), "this log rounds its numbers, so a 0 may be small instead of none")
        ]
    known = [column.values[np.isfinite(column.values)] for column in columns]
    if all(values.size >= 5 and not values.any() for values in known):
        return [
            _no_op(signals, "KL to the old policy and clipped share are exactly 0 in every row", has_llds)
        ]
    return [Ruled("no-op", "old and new policy differ: the KL between them or the clipped share is not 0")]


def _no_op(signals: Signals, evidence: str, has_llds: bool) -> Finding:
    start, end = signals.step(0), signals.step(len(signals.table) - 1)
    return Finding(
        kind="no-op",
        severity="warning" if has_llds else "info",
        title="Each rollout is used up before the policy changes",
        onset_step=start,
        onset_interval=(start, start),
        signals=(Signal("kl_old", "numbers", start, "stuck", 0.0, 0.0, f"{evidence}, up to step {end}"),),
        lead_steps=None,
        confidence=0.9,
        explanation="With one optimizer step per rollout old and new policy are the same, so the ratio is 1, "
        "nothing is clipped, and LLDS is a structural zero. Plain GRPO works all the same.",
        advice=advice_for("no-op", signals.table.engine),
    )


def dead(signals: Signals) -> list[Told]:
    """Gradient and score lie at their floor to the end, and the length too where it is logged."""
    table = signals.table
    need = _needs(signals, "dead", "grad_norm")
    if need or table.values("reward") is None:
        return [need or Missing("dead", ("reward",), "no reward in this log, so dead cannot be told")]
    gradient, reward = table.columns["grad_norm"], table.columns["reward"]
    floor = _gradient_floor(gradient.values)
    if gradient.decimals is not None:
        floor = max(floor, 0.5 * 10.0**-gradient.decimals)
    still = _still_rows(gradient.values, lambda value: value <= floor)
    flat = _flat_rows(reward.values)
    row = max(still, flat)
    count = len(table) - row
    if still >= len(table) or flat >= len(table) or count < 10:
        return [Ruled("dead", "the gradient or the reward still moves")]
    values = reward.values[row:]
    level = float(np.nanmedian(values))
    best = float(np.nanmax(reward.values[:row])) if row and np.isfinite(reward.values[:row]).any() else level
    if level >= best - 1e-9 and row and level > 0:
        return [Ruled("dead", "the reward stands still at its best: there is nothing left to learn")]
    names = [name for name in ("length down",) if signals.holds(name)]
    step = signals.step(row)
    evidence = [
        Signal(
            "grad_norm",
            "entropy-gradient",
            step,
            "stuck",
            math.nan,
            float(np.nanmedian(gradient.values[row:])),
            f"the gradient is at its floor from step {step} on",
        ),
        Signal(
            "reward",
            "reward",
            step,
            "stuck",
            best,
            level,
            f"the reward stays at {level:.4g} from step {step} on; it was up to {best:.4g}",
        ),
    ]
    return [
        Finding(
            kind="dead",
            severity="critical",
            title="Nothing is learnt any more",
            onset_step=step,
            onset_interval=((min(still, flat) and signals.step(min(still, flat))) or step, step),
            signals=tuple(evidence + [signals.describe(name) for name in names]),
            lead_steps=None,
            confidence=confidence(2 + len(names), True),
            explanation=f"For the last {count} rows the gradient is at its floor and the reward does not move.",
            advice=advice_for("dead", table.engine),
        )
    ]


def _gradient_floor(values: Floats) -> float:
    """A thousandth of the gradient that the run had, but nothing that ordinary training reaches."""
    known = values[np.isfinite(values)]
    return max(1e-7, 1e-3 * float(running_median(known, 5).max())) if known.size else 1e-7


def _still_rows(values: Floats, is_still: Callable[[Floats], Bools]) -> int:
    """Return the row from which on at least nine of ten values are still, to the end."""
    known = np.flatnonzero(np.isfinite(values))
    flags = is_still(values[known])
    if not flags.size or flags[-10:].mean() < 0.9:
        return len(values)
    share = np.cumsum(flags[::-1]) / np.arange(1, len(flags) + 1)
    lasting = np.flatnonzero((share >= 0.9) & flags[::-1])
    return int(known[len(flags) - 1 - lasting[-1]])


def _flat_rows(values: Floats) -> int:
    """Return the row from which on a series does not move, to the end."""
    known = np.flatnonzero(np.isfinite(values))
    if known.size < 3:
        return len(values)
    last = float(np.median(values[known[-5:]]))
    spread = float(np.ptp(values[known]))
    return _still_rows(values, lambda value: np.abs(value - last) <= max(1e-9, 0.005 * spread))


# --- tools


def outage(signals: Signals) -> list[Told]:
    """A step down of the reward while the policy's own numbers stay in their band."""
    table = signals.table
    reward = table.values("reward")
    if reward is None:
        return [Missing("outage", ("reward",), "no reward in this log, so outage cannot be told")]
    rows = np.flatnonzero(np.isfinite(reward))
    for jump in jumps(reward[rows], -1, least=0.02):
        row = int(rows[jump.place])
        calm = _policy_is_calm(signals, row)
        others = _jumps_beside(signals, row)
        if calm and _is_outside(signals, others):
            return [_outage(signals, row, int(rows[jump.place - 1]), jump.before, jump.after, others)]
    return [Ruled("outage", "the reward did not drop at once together with time, length or tool success")]


def _is_outside(signals: Signals, others: Sequence[Signal]) -> bool:
    """Say whether something jumped that the policy does not set; length will do where no times are logged."""
    logged = _present(
        signals, "generation_seconds", "tool_seconds", "step_seconds", "tool_success", "tool_failed"
    )
    return any(one.family != "length" for one in others) or (bool(others) and not logged)


def _policy_is_calm(signals: Signals, row: int) -> bool:
    """Entropy, gradient and NLL stay in their band around a row."""
    for series, factor in (("entropy", 1.6), ("grad_norm", 3.0), ("nll", 1.6), ("kl_ref", 3.0)):
        values = signals.table.values(series)
        if values is None:
            continue
        before, after = values[max(0, row - 10) : row], values[row : row + 6]
        before, after = before[np.isfinite(before)], after[np.isfinite(after)]
        if before.size < 3 or not after.size:
            continue
        low, high = float(np.median(np.abs(before))), float(np.median(np.abs(after)))
        if low > 1e-9 and not 1 / (2 * factor) < high / low < factor:
            return False
    return True


def _jumps_beside(signals: Signals, row: int) -> list[Signal]:
    """What else jumped at the same row: times, length, tool success, failed tools."""
    wanted: tuple[tuple[str, Literal[1, -1], Family], ...] = (
        ("generation_seconds", +1, "time"),
        ("tool_seconds", +1, "time"),
        ("step_seconds", +1, "time"),
        ("generation_seconds", -1, "time"),
        ("response_tokens", -1, "length"),
        ("response_tokens", +1, "length"),
        ("tool_success", -1, "behaviour"),
        ("tool_failed", +1, "behaviour"),
        ("aborted", +1, "behaviour"),
    )
    found: list[Signal] = []
    for series, direction, family in wanted:
        values = signals.table.values(series)
        if values is None or any(one.series == series for one in found):
            continue
        rows = np.flatnonzero(np.isfinite(values))
        for jump in jumps(values[rows], direction, z=5.0, share=0.25):
            if abs(int(rows[jump.place]) - row) <= 1:
                words = "jumped" if direction > 0 else "dropped"
                text = (
                    f"{series} {words} from {jump.before:.4g} to {jump.after:.4g} at step {signals.step(row)}"
                )
                found.append(
                    Signal(
                        series,
                        family,
                        signals.step(row),
                        "up" if direction > 0 else "down",
                        jump.before,
                        jump.after,
                        text,
                    )
                )
    return found


def _outage(
    signals: Signals, row: int, last_good: int, before: float, after: float, others: Sequence[Signal]
) -> Finding:
    reward = signals.table.values("reward")
    assert reward is not None
    later = reward[row + 3 :]
    back = np.flatnonzero(later > before - 0.35 * (before - after))
    recovered = back.size >= 3
    end = (
        f"; it came back at step {signals.step(row + 3 + int(back[0]))}"
        if recovered
        else ", and did not come back"
    )
    step = signals.step(row)
    signal = Signal(
        "reward",
        "reward",
        step,
        "down",
        before,
        after,
        f"reward dropped from {before:.4g} to {after:.4g} at step {step}{end}",
    )
    return Finding(
        kind="outage",
        severity="warning" if recovered else "critical",
        title="A tool or the reward failed, not the policy",
        onset_step=step,
        onset_interval=(signals.step(last_good), step),
        signals=(signal, *others),
        lead_steps=0,
        confidence=confidence(1 + len({one.family for one in others}), not recovered),
        explanation="The reward dropped within one step, and so did something that the policy does not set, while "
        "entropy and gradient stayed in their band.",
        advice=advice_for("outage", signals.table.engine),
    )


def tool_abandonment(signals: Signals) -> list[Told]:
    """The policy asks its tools less and less."""
    need = _needs(signals, "tool-abandonment", "turns", "searches")
    if need:
        words = "no turn counts in this log, so abandonment cannot be told"
        return [Missing(need.kind, need.series, words)]
    names = _on(signals, "turns down", "searches down")
    if not names:
        return [Ruled("tool-abandonment", "turns and tool calls did not fall")]
    names.sort(key=lambda name: signals.noticed(name))
    lasting = [name for name in names if signals.holds(name)]
    if not lasting:
        return [Ruled("tool-abandonment", "turns fell, and came back")]
    harm = [
        *_harm(signals),
        *_on(signals, "gradient up", "KL up"),
        *[n for n in _on(signals, "length down") if signals.holds(n)],
    ]
    worse = _harm(signals)
    if not worse and signals.is_on("reward up") and signals.holds("reward up"):
        severity: Severity = "info"
        words = "The policy calls its tools less, and its reward rises: it may have learnt to do without."
    elif worse or len({signals.tracks[name].rule.family for name in harm}) >= 2:
        severity = "critical"
        words = "The policy stopped calling its tools, and got worse."
    else:
        severity = "warning"
        words = "The policy calls its tools less and less; nothing else shows yet."
    return [
        _finding(
            signals, "tool-abandonment", severity, "The policy gives up its tools", [*lasting, *harm], words
        )
    ]


# --- likelihood


def spiral(signals: Signals) -> list[Told]:
    """The death spiral: from likelihood where it is logged, else from what is left to see of phase III."""
    if "displacement_correct" in signals.table.columns or "logprob_correct" in signals.table.columns:
        return _spiral_by_likelihood(signals)
    told: list[Told] = [
        Missing(
            "spiral-phase-2",
            ("logprob_correct", "displacement_correct"),
            "no log-probs of correct responses in this log, so phases I and II of a spiral cannot be told",
        )
    ]
    surge = [name for name in _on(signals, "entropy up", "gradient up") if _is_trouble(signals, name)]
    harm = _harm(signals)
    if len(surge) == 2 and harm and not _tools_fell_first(signals, [*surge, *harm]):
        names = sorted([*surge, *harm], key=lambda name: signals.onset(name)[0])
        names += _on(signals, "KL up", "NLL up")
        words = "Entropy and gradient surge and the reward falls, while turns held until then: phase III of a spiral."
        told.append(_finding(signals, "spiral-phase-3", "critical", "The death spiral", names, words))
    else:
        told.append(Ruled("spiral-phase-3", "entropy and gradient did not surge while the reward fell"))
    return told


def _tools_fell_first(signals: Signals, names: Sequence[str]) -> bool:
    tools = [
        signals.onset(name)[0]
        for name in _on(signals, "turns down", "searches down", "length down")
        if signals.holds(name)
    ]
    return bool(tools) and min(tools) <= min(signals.onset(name)[0] for name in names)


def _spiral_by_likelihood(signals: Signals) -> list[Told]:
    """Let the monitor of a live run go through the log."""
    monitor, alarms = PhaseMonitor(), []
    columns = signals.table.columns
    rename = {"response_tokens": "action_tokens"}
    for row, step in enumerate(signals.table.steps.tolist()):
        series = {rename.get(name, name): float(column.values[row]) for name, column in columns.items()}
        known = {
            name.removeprefix(LOG_PREFIX): value for name, value in series.items() if math.isfinite(value)
        }
        events = monitor.update(step, known)
        # A dead run has a class of its own.
        alarms += [one for one in events if one.kind == "recovered" or "likelihood" in one.families]
    alarms = [event for event in alarms if event.kind != "phase"]
    if not alarms or alarms[-1].kind == "recovered":
        why = "correct responses did not lose likelihood for long" if not alarms else "likelihood recovered"
        return [Ruled("spiral-phase-2", why)]
    started = [event for event in alarms if event.kind == "alarm"]
    last = started[-1]
    phase = 3 if last.phase == 3 or monitor.phase == 3 else 2
    onset = last.onset if last.onset is not None else last.step
    level = columns.get("logprob_correct")
    value = (
        float(level.values[np.isfinite(level.values)][-1])
        if level is not None and np.isfinite(level.values).any()
        else math.nan
    )
    signal = Signal(
        "logprob_correct", "likelihood", onset, "down", math.nan, value, f"step {last.step}: {last.text}"
    )
    names = [name for name in _on(signals, "reward down", "gradient up", "entropy up") if signals.holds(name)]
    return [
        Finding(
            kind=f"spiral-phase-{phase}",
            severity="critical" if last.severity == "critical" else "warning",
            title="The death spiral" if phase == 3 else "Correct responses lose likelihood",
            onset_step=onset,
            onset_interval=(max(int(signals.table.steps[0]), onset - 10), onset + 10),
            signals=(signal, *(signals.describe(name) for name in names)),
            lead_steps=_lead(signals, [signal]),
            confidence=confidence(len(last.families), True),
            explanation="By Def. A.3 of the paper: what an update takes from correct responses stays above 0, and "
            "a second family of signals agrees.",
            advice=advice_for(f"spiral-phase-{phase}", signals.table.engine),
        )
    ]


# --- length and entropy


def length_shrink(signals: Signals) -> list[Told]:
    """Responses become much shorter."""
    need = _needs(signals, "length-shrink", "response_tokens")
    if need:
        return [need]
    if not signals.holds("length down"):
        return [Ruled("length-shrink", "responses did not become much shorter")]
    harm = _harm(signals)
    better = signals.holds("reward up") and not harm
    severity: Severity = "critical" if harm else "info" if better else "warning"
    words = {
        "critical": "Responses shrink and the reward falls.",
        "info": "Responses become shorter while the reward rises: the policy has become more concise.",
        "warning": "Responses shrink to less than half.",
    }[severity]
    return [_finding(signals, "length-shrink", severity, "Responses shrink", ["length down", *harm], words)]


def length_growth(signals: Signals) -> list[Told]:
    """Responses grow until they are cut off; trouble only if the reward falls."""
    need = _needs(signals, "length-growth", "response_tokens", "truncated")
    if need:
        return [need]
    if not signals.holds("truncated up"):
        if signals.holds("length up") and "truncated" not in signals.table.columns:
            return [
                Missing(
                    "length-growth",
                    ("truncated",),
                    "responses grow, and this log does not say how many are cut off",
                )
            ]
        return [Ruled("length-growth", "no larger share of responses is cut off")]
    harm = _harm(signals)
    names = ["truncated up", *(["length up"] if signals.is_on("length up") else []), *harm]
    severity: Severity = "critical" if harm else "info"
    words = "More and more responses are cut off" + (
        ", and the reward falls." if harm else "; the reward holds."
    )
    return [_finding(signals, "length-growth", severity, "Responses are cut off", names, words)]


def entropy_explosion(signals: Signals) -> list[Told]:
    """Entropy grows without the reward; exploration that pays is no trouble."""
    need = _needs(signals, "entropy-explosion", "entropy")
    if need:
        return [need]
    if not signals.is_on("entropy up"):
        return [Ruled("entropy-explosion", "entropy did not rise by much")]
    harm = _harm(signals)
    if not signals.holds("entropy up"):
        return [Ruled("entropy-explosion", "entropy rose and came down again: exploration")]
    if not harm:
        if signals.is_on("reward up"):
            return [Ruled("entropy-explosion", "the reward rises with the entropy: exploration")]
        return [
            _finding(
                signals,
                "entropy-explosion",
                "info",
                "Entropy grows",
                ["entropy up"],
                "Entropy grows; the reward holds.",
            )
        ]
    if _tools_fell_first(signals, ["entropy up"]):
        return [Ruled("entropy-explosion", "entropy rose after turns or length had fallen: a consequence")]
    words = "Entropy grows while the reward falls."
    return [
        _finding(signals, "entropy-explosion", "critical", "Entropy explodes", ["entropy up", *harm], words)
    ]


def entropy_fall(signals: Signals) -> list[Told]:
    """Entropy at almost nothing; common in healthy runs, so never more than a warning."""
    need = _needs(signals, "entropy-fall", "entropy")
    if need:
        return [need]
    track = signals.tracks.get("entropy down")
    if track is None or not track.holds or float(track.level[-1]) > 0.1:
        return [Ruled("entropy-fall", "entropy did not fall to almost nothing")]
    harm = _harm(signals)
    severity: Severity = "warning" if harm else "info"
    words = "Entropy fell to almost nothing" + (
        ", and the reward fell." if harm else "; low entropy alone is common in healthy runs."
    )
    return [
        _finding(signals, "entropy-fall", severity, "Entropy is almost gone", ["entropy down", *harm], words)
    ]


#: In the order in which equal findings are told: causes before consequences.
DETECTORS: tuple[Callable[[Signals], list[Told]], ...] = (
    nan,
    outage,
    spiral,
    tool_abandonment,
    length_shrink,
    length_growth,
    entropy_explosion,
    entropy_fall,
    dead,
    no_op,
)
#: Those that speak before there are :data:`LEAST_ROWS` rows.
EARLY = (nan, outage, dead)
