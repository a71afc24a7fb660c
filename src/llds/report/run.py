"""The page of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from llds.diagnosis.page import finding_section
from llds.diagnosis.telling import headline, summary
from llds.dynamics.phases import PHASES
from llds.pages import badge, charts, document, escape, folded, items, rows, section
from llds.plots import Mark
from llds.report import responses
from llds.report.record import Record
from llds.report.scores import changed_answers, score_chart, score_table
from llds.report.series import other_charts, phase_strip, run_charts
from llds.training.records import RunFolder

STYLE = (
    responses.STYLE
    + """
.phases{max-width:560px}.phase0{fill:var(--grid)}.phase1{fill:var(--ok)}.phase2{fill:var(--info)}
.phase3{fill:var(--warning)}.phase4{fill:var(--critical)}
i.phase0{background:var(--grid)}i.phase1{background:var(--ok)}i.phase2{background:var(--info)}
i.phase3{background:var(--warning)}i.phase4{background:var(--critical)}
i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .3em 0 .9em}
"""
)
# Events that a reader of the page wants to see one by one, and those that are told as a number.
_TOLD = ("resume", "alarm", "recovered", "rollback", "alarm_stop", "stop", "failed", "finish")
_MOST_EVENTS = 60


def run_page(record: Record) -> str:
    """Return the page of a run. Every text of the run is escaped; nothing is loaded from anywhere."""
    table, verdict = record.table, record.diagnosis
    marks = _marks(record)
    body = [
        f"<h1>{escape(record.name)}</h1>",
        f"<p>{escape(state_of(record))}</p>",
        f"<p>{badge(verdict.severity)} {escape(headline(verdict))}. {escape(summary(verdict))}</p>"
        if verdict
        else "",
        score_table(record),
        section("LLDS", _llds_lines(record)),
        _phases(record),
        charts([score_chart(record), *(run_charts(table, marks) if table is not None else [])]),
        *(finding_section(one) for one in (verdict.findings if verdict else ())),
        section(
            "What to change",
            [line for one in (verdict.findings[:1] if verdict else ()) for line in one.advice],
        ),
        _events(record),
        _written(record),
        _heading("Held-out answers that changed", changed_answers(record.evaluations)),
        folded("All other series", charts(other_charts(table)) if table is not None else ""),
        folded("Recipe", f"<pre>{escape(record.config)}</pre>"),
    ]
    return document(f"llds: {record.name}", body, STYLE)


def state_of(record: Record) -> str:
    """Return in a sentence how far the run is, and what it trains."""
    model = ""
    if record.recipe is not None:
        model = f" Model {record.recipe.model.path}, λ = {record.recipe.llds.coef:g}, seed {record.recipe.run.seed}."
    unit = (
        "rollouts" if record.recipe is not None and record.recipe.run.engine == "verl" else "optimizer steps"
    )
    if record.finished:
        return f"Finished after {record.last_step} {unit}.{model}"
    planned = f" of {record.planned_steps}" if record.planned_steps else ""
    ended = record.events_of("stop", "alarm_stop", "failed", "finish", "start", "resume")
    last = ended[-1]["event"] if ended else "start"
    how = {
        "stop": "stopped",
        "alarm_stop": "stopped by an alarm",
        "failed": f"failed: {ended[-1].get('reason', '') if ended else ''}",
        "finish": "finished",
    }.get(last, "going on, or cut off")
    return f"{record.last_step}{planned} {unit} are done; {how}.{model}"


def _llds_lines(record: Record) -> list[str]:
    said = record.events_of("llds")
    lines = [str(said[-1].get("text", ""))] if said else []
    if record.rows:
        counts = ", ".join(f"{name} in {count}" for name, count in record.penalty.items())
        lines.append(f"The penalty was {counts} of {len(record.rows)} optimizer steps.")
    return lines


def _marks(record: Record) -> list[Mark]:
    alarms = _steps(record, "alarm", "step")
    undone = _steps(record, "rollback", "to_step")
    return [
        *(Mark(step, None, f"alarm, step {step}" if step == alarms[0] else "") for step in alarms),
        *(Mark(step, None, f"back to step {step}") for step in undone),
    ]


def _steps(record: Record, kind: str, key: str) -> list[int]:
    values = (event.get(key) for event in record.events_of(kind))
    return [value for value in values if isinstance(value, int)]


def _phases(record: Record) -> str:
    strip = phase_strip(record.table) if record.table is not None else ""
    if not strip:
        return ""
    names = "".join(f'<i class="phase{number + 1}"></i>{escape(name)}' for number, name in PHASES.items())
    return f'<h2>Phases</h2><div class="phases">{strip}</div><p class="dim">{names}</p>'


def _events(record: Record) -> str:
    told = record.events_of(*_TOLD)
    lines = [[_when(event), str(event["event"]), str(event.get("step", "")), _what(event)] for event in told]
    failed = Counter(
        str(event["event"]) for event in record.events if str(event.get("event", "")).startswith("tool")
    )
    counts = [f"{name}: {count} times" for name, count in failed.items()]
    if not lines and not counts:
        return ""
    left = (
        f'<p class="dim">The first {_MOST_EVENTS} of {len(lines)}.</p>' if len(lines) > _MOST_EVENTS else ""
    )
    return f"<h2>Events</h2>{items(counts)}{rows(['when (UTC)', 'event', 'step', 'what'], lines[:_MOST_EVENTS])}{left}"


def _when(event: Mapping[str, Any]) -> str:
    try:
        return datetime.fromtimestamp(float(event["time"]), UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return ""


def _what(event: Mapping[str, Any]) -> str:
    onset = f" Onset: step {event['onset']}." if event.get("onset") is not None else ""
    return f"{event.get('text') or event.get('reason') or ''}{onset}"


def _written(record: Record) -> str:
    rollouts = {row["step"]: row["rollout"] for row in record.rows if "rollout" in row}
    alarms = _steps(record, "alarm", "step")
    blocks = responses.sampled_responses(RunFolder(record.folder), rollouts, alarms)
    return _heading("What it wrote", responses.legend() + blocks if blocks else "")


def _heading(title: str, inside: str) -> str:
    return f"<h2>{escape(title)}</h2>{inside}" if inside else ""
