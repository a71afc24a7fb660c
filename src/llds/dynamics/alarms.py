"""What to do about an alarm: a decision as data. The trainer acts on it; nothing here touches a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from llds.dynamics.phases import Event, Severity
from llds.objective.checks import check_above, check_choice, check_least

Action = Literal["none", "warn", "stop", "rollback"]
_RANKS: dict[Severity, int] = {"info": 0, "warning": 1, "critical": 2}


@dataclass(frozen=True)
class AlarmPolicy:
    """What to do on an alarm.

    ``on_alarm``: tell of it, stop the run, or go back to the last checkpoint before the onset. ``act_from``:
    the severity from which on the run is touched; below it an alarm is only told. ``coef_factor``: what λ is
    multiplied with at a rollback, at least 1; a λ of 0 becomes ``coef_start``. ``coef_limit``: λ is raised no
    further. ``max_rollbacks``: then the run stops.
    """

    on_alarm: Literal["warn", "stop", "rollback"] = "warn"
    act_from: Severity = "warning"
    coef_factor: float = 1.0
    coef_start: float = 0.0
    coef_limit: float = 2.0
    max_rollbacks: int = 2

    def __post_init__(self) -> None:
        check_choice(("warn", "stop", "rollback"), on_alarm=self.on_alarm)
        check_choice(("warning", "critical"), act_from=self.act_from)
        check_least(1.0, coef_factor=self.coef_factor)
        check_least(0.0, coef_start=self.coef_start, max_rollbacks=self.max_rollbacks)
        check_above(0.0, coef_limit=self.coef_limit)


@dataclass(frozen=True)
class Decision:
    """What the trainer should do now.

    ``checkpoint``: the step to go back to, with ``rollback``. ``coef``: λ from then on; None leaves it as it
    is. ``reason``: a sentence for the person who watches.
    """

    action: Action
    reason: str = ""
    checkpoint: int | None = None
    coef: float | None = None


def decide(
    policy: AlarmPolicy,
    events: Iterable[Event],
    *,
    checkpoints: Sequence[int] = (),
    coef: float = 0.0,
    rollbacks: int = 0,
) -> Decision:
    """Turn the events of one optimizer step into a decision.

    ``checkpoints``: steps to which the run can go back. ``coef``: λ now. ``rollbacks``: how often it went
    back already. Without an alarm among the events there is nothing to do.
    """
    alarms = [event for event in events if event.kind == "alarm"]
    if not alarms:
        return Decision("none")
    alarm = max(alarms, key=lambda event: _RANKS[event.severity])
    if policy.on_alarm == "warn" or _RANKS[alarm.severity] < _RANKS[policy.act_from]:
        return Decision("warn", alarm.text)
    if policy.on_alarm == "stop":
        return Decision("stop", f"{alarm.text} The run stops, as on_alarm = stop says.")
    if rollbacks >= policy.max_rollbacks:
        return Decision("stop", f"{alarm.text} The run went back {rollbacks} times already and stops.")
    checkpoint = last_before(alarm.step if alarm.onset is None else alarm.onset, checkpoints)
    if checkpoint is None:
        return Decision("stop", f"{alarm.text} No checkpoint is older than the onset, so the run stops.")
    raised = _raised(policy, coef)
    change = "" if raised is None else f" and λ rises from {coef:g} to {raised:g}"
    return Decision(
        "rollback", f"{alarm.text} The run goes back to step {checkpoint}{change}.", checkpoint, raised
    )


def last_before(onset: int, checkpoints: Sequence[int]) -> int | None:
    """Return the latest of ``checkpoints`` before ``onset``; None if there is none."""
    return max((step for step in checkpoints if step < onset), default=None)


def _raised(policy: AlarmPolicy, coef: float) -> float | None:
    wanted = coef * policy.coef_factor if coef > 0 else policy.coef_start
    raised = max(coef, min(policy.coef_limit, wanted))
    return raised if raised != coef else None
