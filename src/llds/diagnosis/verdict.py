"""Evidence into a verdict: which finding comes first, what it was not, and what cannot be told."""

from __future__ import annotations

import numpy as np

from llds.diagnosis.advice import advice_for
from llds.diagnosis.detectors import DETECTORS, EARLY, LEAST_ROWS, Told
from llds.diagnosis.findings import SEVERITIES, Diagnosis, Finding, Missing, Ruled, Severity
from llds.diagnosis.signals import Signals, find_signals
from llds.diagnosis.table import Table
from llds.diagnosis.vocabulary import SERIES

# Rows.
_AT_ONCE = 3
#: A collapse and what follows from it: the consequence never comes before the cause.
_CONSEQUENCES = {"dead", "entropy-fall", "entropy-explosion", "length-shrink"}


def diagnose(table: Table) -> Diagnosis:
    """Say what happened in a run.

    What is found at a row depends on the rows up to it; so ``diagnose(table.head(n))`` is what
    ``llds watch`` says after row n.
    """
    signals = find_signals(table)
    is_short = len(table) < LEAST_ROWS
    told: list[Told] = [one for detector in (EARLY if is_short else DETECTORS) for one in detector(signals)]
    every = int(np.median(np.diff(table.steps))) if len(table) > 1 else 1
    findings = _ordered([one for one in told if isinstance(one, Finding)], every)
    verdict, severity = _verdict(findings, is_short)
    first = findings[0] if findings and findings[0].kind == verdict else None
    if is_short and not findings:
        findings = (_too_short(signals),)
    return Diagnosis(
        verdict=verdict,
        severity=severity,
        onset_step=first.onset_step if first else None,
        first_signal=first.signals[0] if first and first.signals else None,
        steps=len(table),
        first_step=int(table.steps[0]) if len(table) else None,
        last_step=int(table.steps[-1]) if len(table) else None,
        findings=findings,
        ruled_out=tuple(one for one in told if isinstance(one, Ruled)),
        missing=tuple(one for one in told if isinstance(one, Missing)),
        notes=(*table.notes, *_notes(table)),
    )


def _ordered(findings: list[Finding], every: int) -> tuple[Finding, ...]:
    """Worst first; of equal ones causes before consequences, then the earlier onset. ``every``: steps per row."""

    def place(finding: Finding) -> tuple[int, bool, int]:
        onset = finding.onset_step if finding.onset_step is not None else 1 << 60
        return -SEVERITIES.index(finding.severity), finding.kind in _CONSEQUENCES, onset

    ordered = sorted(findings, key=place)
    return tuple(sorted(ordered, key=lambda finding: not _died_at_once(finding, findings, every)))


def _died_at_once(finding: Finding, all_of_them: list[Finding], every: int) -> bool:
    """Say whether a run is dead from the moment at which anything serious showed: then that is what happened."""
    if finding.kind != "dead" or finding.onset_interval is None:
        return False
    serious = [
        one.onset_step for one in all_of_them if one.severity == "critical" and one.onset_step is not None
    ]
    return min(serious) >= finding.onset_interval[0] - _AT_ONCE * every


def _verdict(findings: tuple[Finding, ...], is_short: bool) -> tuple[str, Severity]:
    """The worst finding names the run; what is only worth a word does not, but for a no-op."""
    if findings and findings[0].severity in {"warning", "critical"}:
        return findings[0].kind, findings[0].severity
    if is_short:
        return "not-enough-data", "info"
    if any(finding.kind == "no-op" for finding in findings):
        return "no-op", "info"
    return "healthy", "info" if findings else "ok"


def _too_short(signals: Signals) -> Finding:
    count = len(signals.table)
    return Finding(
        kind="not-enough-data",
        severity="info",
        title="Too few rows for a verdict",
        onset_step=None,
        onset_interval=None,
        signals=(),
        lead_steps=None,
        confidence=0.0,
        explanation=f"The log has {count} row{'' if count == 1 else 's'}; a verdict needs {LEAST_ROWS}.",
        advice=advice_for("not-enough-data", signals.table.engine),
    )


def _notes(table: Table) -> list[str]:
    notes = []
    if table.damaged_count:
        first = table.damaged[0]
        where = ", ".join(str(one.line) for one in table.damaged[:5])
        notes.append(
            f"{table.damaged_count} damaged lines were left out (line {where}"
            f"{', …' if table.damaged_count > 5 else ''}): {first.reason}."
        )
    notes += [
        f"The run went back from step {resume.from_step} to {resume.to_step}; the later rows count."
        for resume in table.resumes[:5]
    ]
    series = [column for name, column in table.columns.items() if name in SERIES]
    rounded = [column.key for column in series if column.decimals is not None]
    if 2 * len(rounded) > len(series):
        notes.append(f"The log rounds its numbers, such as {rounded[0]}: a 0 there may be a small value.")
    averaged = {column.masked_mean for column in series if column.masked_mean}
    notes += [f"Of some series {note}." for note in sorted(averaged)]
    return notes
