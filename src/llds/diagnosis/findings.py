"""What a diagnosis says: its classes, its evidence, its advice. Data only; the JSON of ``--json`` mirrors it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("ok", "info", "warning", "critical")

#: Family of signals; two families are independent measurements.
Family = Literal["likelihood", "reward", "entropy-gradient", "behaviour", "length", "time", "numbers"]

#: Every verdict there is, with what it means in a sentence.
CLASSES: Mapping[str, str] = {
    "healthy": "Nothing looks wrong.",
    "spiral-phase-1": "The likelihood of correct responses has stopped rising while reward rises.",
    "spiral-phase-2": "The likelihood of correct responses decays steadily while reward still holds.",
    "spiral-phase-3": "Likelihood plunges, entropy and gradient surge, reward falls: the death spiral.",
    "tool-abandonment": "The policy stopped calling its tools.",
    "outage": "A tool or the reward failed; the policy did not.",
    "length-shrink": "Responses became much shorter.",
    "length-growth": "Responses grew until they were cut off.",
    "entropy-fall": "The policy's entropy fell to almost nothing.",
    "entropy-explosion": "The policy's entropy grew without its reward.",
    "nan": "A number that is not finite appeared.",
    "dead": "Gradient, length and score all lie at their floor.",
    "no-op": "Old and new policy are the same: the ratio, the clip and LLDS can do nothing.",
    "not-enough-data": "There are too few rows for a verdict.",
}


@dataclass(frozen=True)
class Signal:
    """One series that left its band: which, at which step, in which family, and the numbers that say so.

    ``baseline``, ``value``: before, and where it went; units are the series'. ``evidence``: one sentence.
    """

    series: str
    family: Family
    step: int
    direction: Literal["up", "down", "stuck", "nan"]
    baseline: float
    value: float
    evidence: str


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    ``kind``: a key of :data:`CLASSES`. ``onset_step`` with ``onset_interval`` (first and last step where it may
    have begun). ``signals``: in order of step. ``lead_steps``: steps from the first signal to the visible fall
    of reward or surge of gradient, or None where neither was seen. ``confidence``: 0 to 1. ``advice``: what to
    change, with the setting's name in that engine.
    """

    kind: str
    severity: Severity
    title: str
    onset_step: int | None
    onset_interval: tuple[int, int] | None
    signals: tuple[Signal, ...]
    lead_steps: int | None
    confidence: float
    explanation: str
    advice: tuple[str, ...]


@dataclass(frozen=True)
class Ruled:
    """Something it was not, and why: ``kind`` a key of :data:`CLASSES`, ``why`` one sentence."""

    kind: str
    why: str


@dataclass(frozen=True)
class Missing:
    """Something that cannot be told from this log: the class, the series that it needs, one sentence."""

    kind: str
    series: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Diagnosis:
    """The whole verdict. ``findings``: worst first; the first one's kind is the verdict unless it is healthy."""

    verdict: str
    severity: Severity
    onset_step: int | None
    first_signal: Signal | None
    steps: int
    first_step: int | None
    last_step: int | None
    findings: tuple[Finding, ...]
    ruled_out: tuple[Ruled, ...]
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]
