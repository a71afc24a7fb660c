"""Where a run stands on the way to collapse, told online from its series.

After Def. 4.1 and A.3 of arXiv 2512.04220. The rules, in full:

- *Signals.* Each puts one series through one statistic of :mod:`llds.dynamics.detectors` and is on or off,
  with hysteresis. They belong to four families: likelihood (displacement, level), entropy and gradient,
  reward, behaviour (searches, length); see :data:`SIGNALS`.
- *Displacement* looks at what one update takes from correct responses: ``displacement_correct`` divided by
  ``updates_since_rollout``. It is on when this stays above ε (condition 1 of A.3). In a step right after a
  rollout it is 0 by construction; if not, as with log-probs of an inference engine, the median of what it
  was there is taken off.
- *Alarm*: displacement is on, and so is a signal of a second family. Entropy alone is what exploration looks
  like; displacement alone may be made good by the next rollout. Critical with a third family, or in phase
  III.
- *Phase* II: displacement is on, and the level (log-prob of correct responses) has left its best or entropy
  has risen. III: also the entropy and gradient family is on, and either what an update takes has
  doubled (condition 3) or the reward family is on. Otherwise 0 if the level is rising, else I.
- *Onset*: the step from which on an update takes more and the level goes down, by the best fit to both
  (:func:`~llds.dynamics.detectors.find_onset`). It is looked for when the decline is noticed, and again at
  each alarm.
- *Dead*: for 20 steps no response was better or worse than its group, so nothing is learnt, and the reward
  is below half of what it was at its best. That is an alarm as well, critical, of the reward and the
  gradient family; a collapse within the first steps is seen by this alone, for the others need a past.
- *Strictly on-policy* training has no displacement to measure. There the level has to fall further, and the
  reward or the behaviour family has to be on too; entropy doesn't count as a second family, for it is the
  mean of −log-prob, the same thing again.

Nothing looks ahead: what is said at a step depends on this step and those before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from llds.dynamics.detectors import Drift, Latch, Persistence, Track, find_onset
from llds.dynamics.vocabulary import LOG_PREFIX, Family
from llds.errors import LLDSError
from llds.objective.checks import check_least

Kind = Literal["phase", "alarm", "recovered"]
Severity = Literal["info", "warning", "critical"]
#: Value of the series ``phase`` -> its name.
PHASES = {-1: "warm-up", 0: "rising", 1: "I (stagnation)", 2: "II (steady decay)", 3: "III (acceleration)"}
#: A number beyond this is no measurement.
LARGEST = 1e15
#: Version of :meth:`PhaseMonitor.state_dict`.
STATE_VERSION = 2


@dataclass(frozen=True)
class Signal:
    """One signal: the first of ``series`` that a step has, and the statistic it is put through.

    ``bad``: +1 where rising is bad, −1 where falling is. ``least``: smallest move that counts, in the unit of
    the series, or as log-ratio with ``logarithm``.
    """

    family: Family
    series: tuple[str, ...]
    bad: int
    least: float
    logarithm: bool = False


#: The drifts that are watched, beside displacement.
SIGNALS: Mapping[str, Signal] = {
    "level": Signal("likelihood", ("logprob_correct",), -1, 0.01),
    "entropy": Signal("entropy-gradient", ("policy_entropy", "entropy"), +1, 0.02),
    "gradient": Signal("entropy-gradient", ("grad_norm",), +1, math.log(1.5), logarithm=True),
    "reward": Signal("reward", ("exact_match", "reward"), -1, 0.02),
    "searches": Signal("behaviour", ("searches", "turns"), -1, 0.3),
    "shorter": Signal("behaviour", ("action_tokens",), -1, math.log(1.5), logarithm=True),
    "longer": Signal("behaviour", ("action_tokens",), +1, math.log(1.5), logarithm=True),
}
FAMILY_OF: Mapping[str, Family] = {
    "displacement": "likelihood",
    "level alone": "likelihood",
    **{name: signal.family for name, signal in SIGNALS.items()},
}


@dataclass(frozen=True)
class PhaseSettings:
    """Thresholds of the monitor.

    ``epsilon``: displacement of correct responses to overlook, nats per token and update (−ε of A.3).
    ``displacement_on``, ``displacement_off``: bounds of the cumulative sum. ``drift_on``, ``drift_off``:
    bounds of a drift; ``level_alone``: upper bound for the level where displacement can't be measured;
    ``rising``: improvement of the level from which on likelihood counts as rising. All these in units of the
    noise. ``on_policy_after``: optimizer steps without displacement to measure, until the level decides
    alone. ``similarity``: c of A.3. ``dead_after``: optimizer steps without any signal until a run
    counts as dead.
    """

    epsilon: float = 1e-4
    displacement_on: float = 9.0
    displacement_off: float = 2.0
    drift_on: float = 3.5
    drift_off: float = 1.5
    level_alone: float = 5.0
    rising: float = 1.5
    on_policy_after: int = 40
    similarity: float = 0.5
    dead_after: int = 20

    def __post_init__(self) -> None:
        check_least(0.0, **asdict(self))
        for name, low, high in (
            ("displacement", self.displacement_off, self.displacement_on),
            ("drift", self.drift_off, min(self.drift_on, self.level_alone)),
        ):
            if low > high:
                raise LLDSError(
                    f"{name}_off must not be above the bound that turns it on, but {low} > {high}."
                )


@dataclass(frozen=True)
class Event:
    """Something to tell.

    ``kind``: "phase" (it changed), "alarm" or "recovered" (correct responses stopped losing). ``onset``: the
    step at which the decline began, as far as can be told. ``families``: those with a signal on; an alarm has
    two or more. ``evidence``: signal -> its statistic at ``step``. ``criteria``: the conditions of A.3, None
    where unknown.
    """

    kind: Kind
    severity: Severity
    step: int
    phase: int
    onset: int | None
    families: tuple[Family, ...]
    evidence: dict[str, float]
    criteria: dict[str, bool | None]
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {**asdict(self), "families": list(self.families)}


@dataclass
class _State:
    """All that the monitor remembers; plain data."""

    displacement: Persistence
    level: Track
    drifts: dict[str, Drift]
    latches: dict[str, Latch]
    step: int | None = None
    steps: int = 0
    phase: int = -1
    onset: int | None = None
    alarm: str = ""
    statistics: dict[str, float] = field(default_factory=dict)
    wrong: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    similarity: float | None = None
    reward: float | None = None
    best_reward: float | None = None
    starved: int = 0
    starved_since: int | None = None


class PhaseMonitor:
    """Feed it the series of every optimizer step; it returns what is worth telling."""

    def __init__(self, settings: PhaseSettings | None = None) -> None:
        self.settings = rule = settings or PhaseSettings()
        self._state = _State(
            Persistence(rule.epsilon),
            Track(),
            {name: Drift(signal.bad, signal.least) for name, signal in SIGNALS.items()},
            {
                "displacement": Latch(rule.displacement_on, rule.displacement_off),
                "level alone": Latch(rule.level_alone, rule.drift_off),
                **{name: Latch(rule.drift_on, rule.drift_off) for name in SIGNALS},
            },
        )

    @property
    def phase(self) -> int:
        """The phase by number; names in :data:`PHASES`."""
        return self._state.phase

    @property
    def onset(self) -> int | None:
        """The step at which the present decline began; None while there is none."""
        return self._state.onset

    def update(self, step: int, series: Mapping[str, Any]) -> list[Event]:
        """Take the series of ``step`` by canonical name, with or without the log prefix; any may be absent.

        None, NaN and values beyond :data:`LARGEST` count as absent. Raises ``LLDSError`` unless steps rise.
        """
        state = self._state
        if state.step is not None and step <= state.step:
            raise LLDSError(
                f"The monitor was given step {step} after step {state.step}; to go back to a checkpoint, "
                "load the state that was saved with it."
            )
        state.step, state.steps = step, state.steps + 1
        numbers = {name.removeprefix(LOG_PREFIX): _number(value) for name, value in series.items()}
        self._measure(step, numbers)
        return [*self._judge(step), *self._starve(step, numbers)]

    def state_dict(self) -> dict[str, Any]:
        """Return all that it remembers, as plain JSON."""
        return {"version": STATE_VERSION, "settings": asdict(self.settings), **asdict(self._state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises ``LLDSError`` when it was taken by another version or with other settings.
        """
        content = deepcopy(dict(saved))
        if content.pop("version", None) != STATE_VERSION:
            raise LLDSError("The monitor's state comes from another version of llds; start it anew.")
        if content.pop("settings") != asdict(self.settings):
            raise LLDSError("The monitor's state was saved with other settings; use them, or start anew.")
        content["displacement"]["track"] = Track(**content["displacement"]["track"])
        content["displacement"] = Persistence(**content["displacement"])
        content["level"] = Track(**content["level"])
        content["drifts"] = {name: Drift(**drift) for name, drift in content["drifts"].items()}
        content["latches"] = {name: Latch(**latch) for name, latch in content["latches"].items()}
        self._state = _State(**content)

    def _measure(self, step: int, series: Mapping[str, float | None]) -> None:
        """Put every series through its statistic, and the statistic to its switch."""
        state = self._state
        updates = series.get("updates_since_rollout")
        state.similarity = _first(series, ("hidden_similarity",), state.similarity)
        wrong = _per_update(series.get("displacement_wrong"), updates)
        state.wrong = state.wrong if wrong is None else [*state.wrong[-31:], wrong]
        lost = _per_update(self._without_offset(series.get("displacement_correct"), updates), updates)
        statistics = {"displacement": state.displacement.update(step, lost)}
        for name, signal in SIGNALS.items():
            value = _first(series, signal.series)
            if signal.logarithm and value is not None:
                value = math.log(value) if value > 0 else None
            statistics[name] = state.drifts[name].update(value)
        statistics["level alone"] = statistics["level"]
        level = series.get("logprob_correct")
        if level is not None:
            state.level.add(step, level)
        for name, statistic in statistics.items():
            state.latches[name].update(statistic)
            if statistic is not None:
                state.statistics[name] = round(statistic, 3)

    def _starve(self, step: int, series: Mapping[str, float | None]) -> list[Event]:
        """Count the steps in which no response was better or worse than its group; tell of a dead run."""
        state = self._state
        state.reward = _first(series, SIGNALS["reward"].series, state.reward)
        if state.reward is not None:
            state.best_reward = max(state.reward, state.best_reward or state.reward)
        signal = [series.get(f"responses_{sign}") for sign in ("correct", "wrong")]
        if signal != [0, 0]:
            state.starved, state.starved_since = 0, None
            return []
        state.starved += 1
        state.starved_since = step if state.starved_since is None else state.starved_since
        best, now = state.best_reward, state.reward
        if state.starved != self.settings.dead_after or best is None or now is None or now >= 0.5 * best:
            return []
        return [self._dead(step, best, now)]

    def _dead(self, step: int, best: float, now: float) -> Event:
        state = self._state
        return Event(
            "alarm",
            "critical",
            step,
            state.phase,
            state.starved_since,
            ("entropy-gradient", "reward"),
            {"steps_without_signal": float(state.starved), "best_reward": best, "reward": now},
            self._criteria(self._on()),
            f"the run is dead: since step {state.starved_since} no response was better or worse than its group, "
            f"so nothing is learnt, and the reward went from {best:.3g} to {now:.3g}.",
        )

    def _without_offset(self, displacement: float | None, updates: float | None) -> float | None:
        """Take off what displacement shows right after a rollout, before any update could do anything."""
        fresh = self._state.fresh
        if displacement is None:
            return None
        if updates == 0:
            self._state.fresh = [*fresh[-14:], displacement]
        return displacement - median(fresh) if fresh else displacement

    def _judge(self, step: int) -> list[Event]:
        """Draw the conclusions from the switches, and tell what changed."""
        state, on = self._state, self._on()
        is_measured = state.displacement.is_measured
        is_losing = "displacement" in on if is_measured else self._falls_on_policy(on)
        events = []
        if is_losing and state.onset is None:
            state.onset = self._find_onset()
        elif not is_losing and state.onset is not None:
            if state.alarm:
                events.append(self._event("recovered", "info", step))
            state.onset, state.alarm = None, ""
        phase = self._phase(is_losing, on)
        if phase != state.phase:
            state.phase = phase
            events.append(self._event("phase", "info", step))
        severity = self._severity(is_losing, is_measured, on)
        if severity and state.alarm not in (severity, "critical"):
            state.onset = state.onset if state.alarm else self._find_onset()
            state.alarm = severity
            events.append(self._event("alarm", severity, step))
        return events

    def _find_onset(self) -> int | None:
        return find_onset(self._state.displacement.track, self._state.level)

    def _on(self) -> set[str]:
        return {name for name, latch in self._state.latches.items() if latch.is_on}

    def _falls_on_policy(self, on: set[str]) -> bool:
        is_late = self._state.steps > self.settings.on_policy_after
        return is_late and "level alone" in on and bool(_families(on) & {"reward", "behaviour"})

    def _phase(self, is_losing: bool, on: set[str]) -> int:
        state, level = self._state, self._state.drifts["level"]
        # Once in III, it stays there until likelihood recovers: the last correct responses are soon gone.
        if is_losing and state.phase == 3:
            return 3
        if is_losing and {"level", "entropy"} & on:
            is_faster = "reward" in on or state.displacement.accelerates(state.onset or 0)
            return 3 if is_faster and "entropy-gradient" in _families(on) else 2
        if level.seen < level.warmup:
            return -1
        return 0 if level.improvement() >= self.settings.rising else 1

    def _severity(self, is_losing: bool, is_measured: bool, on: set[str]) -> Severity | None:
        others = _families(on) - {"likelihood"}
        if not is_measured:
            others -= {"entropy-gradient"}
        if not is_losing or not others:
            return None
        return "critical" if self._state.phase == 3 or len(others) > 1 else "warning"

    def _event(self, kind: Kind, severity: Severity, step: int) -> Event:
        state, on = self._state, self._on()
        name = PHASES[state.phase]
        texts: dict[Kind, str] = {
            "phase": f"phase {name} since step {step}",
            "alarm": f"correct responses lose likelihood since about step {state.onset}; phase {name}",
            "recovered": f"correct responses don't lose likelihood any more at step {step}; phase {name}",
        }
        return Event(
            kind,
            severity,
            step,
            state.phase,
            state.onset,
            tuple(sorted(_families(on))),
            dict(state.statistics),
            self._criteria(on),
            f"{texts[kind]}; signals that are on: {', '.join(sorted(on)) or 'none'}.",
        )

    def _criteria(self, on: set[str]) -> dict[str, bool | None]:
        """Return the conditions of Def. A.3, the second in its two halves."""
        state = self._state
        return {
            "correct_fall": "displacement" in on if state.displacement.track.values else None,
            "wrong_do_not_rise": median(state.wrong) >= -self.settings.epsilon if state.wrong else None,
            "similar": None if state.similarity is None else state.similarity >= self.settings.similarity,
            "accelerates": None if state.onset is None else state.displacement.accelerates(state.onset),
        }


def _families(on: set[str]) -> set[Family]:
    return {FAMILY_OF[name] for name in on}


def _number(value: Any) -> float | None:
    """Return a usable number, None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= LARGEST else None


def _first(
    series: Mapping[str, float | None], names: tuple[str, ...], otherwise: float | None = None
) -> float | None:
    return next((value for name in names if (value := series.get(name)) is not None), otherwise)


def _per_update(displacement: float | None, updates: float | None) -> float | None:
    """Return what one update took; None if that can't be told, as right after a rollout, where it is 0."""
    if updates is None:
        return displacement or None
    return None if displacement is None or updates <= 0 else _number(displacement / updates)
