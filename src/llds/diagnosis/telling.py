"""What a diagnosis says, in words; the terminal page and the HTML page share them."""

from __future__ import annotations

from llds.diagnosis.findings import CLASSES, Diagnosis, Finding
from llds.diagnosis.table import Table

#: The series that a page shows first, where the log has them.
SHOWN = (
    *("reward", "validation", "turns", "searches", "response_tokens", "truncated", "entropy", "grad_norm"),
    *("logprob_correct", "displacement_correct", "nll", "kl_ref", "kl_old", "clip_share", "tool_success"),
    *("generation_seconds", "tool_seconds", "llds_loss"),
)


def headline(diagnosis: Diagnosis) -> str:
    """Return the verdict as a line."""
    name = diagnosis.verdict.replace("-", " ")
    onset = f", from step {diagnosis.onset_step} on" if diagnosis.onset_step is not None else ""
    return f"{name}{onset}"


def summary(diagnosis: Diagnosis) -> str:
    """Return what the verdict means, and what came first."""
    words = [CLASSES[diagnosis.verdict]]
    first = diagnosis.findings[0] if diagnosis.findings else None
    if first is not None and first.kind == diagnosis.verdict:
        words = [first.explanation]
        if first.onset_interval and first.onset_step is not None:
            low, high = first.onset_interval
            words.append(f"It began at step {first.onset_step} (between {low} and {high}).")
        if diagnosis.first_signal is not None:
            signal = diagnosis.first_signal
            words.append(f"The first signal was {signal.series} at step {signal.step}{_lead_words(first)}.")
        if first.confidence:
            words.append(f"Confidence {first.confidence:.0%}.")
    return " ".join(words)


def _lead_words(finding: Finding) -> str:
    if finding.lead_steps is None:
        return ""
    if finding.lead_steps == 0:
        return ", together with the visible trouble"
    return f", {finding.lead_steps} steps before the reward fell or the gradient surged"


def about(table: Table) -> str:
    """Return what was read."""
    span = f"steps {table.steps[0]} to {table.steps[-1]}" if len(table) else "no steps"
    files = ", ".join(table.files[:3]) + (f" and {len(table.files) - 3} more" if len(table.files) > 3 else "")
    rows = "1 row" if len(table) == 1 else f"{len(table)} rows"
    return f"{files}: {rows}, {span}; {table.engine} ({table.format})"


def shown_series(table: Table, diagnosis: Diagnosis) -> list[str]:
    """Return the series to show: those that gave signals first, then the usual ones."""
    signalled = [signal.series for finding in diagnosis.findings for signal in finding.signals]
    wanted = [*signalled, *SHOWN]
    return list(dict.fromkeys(name for name in wanted if name in table.columns))
