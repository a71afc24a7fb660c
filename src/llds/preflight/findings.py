"""What a preflight says: faults by number, evidence, and the setting to change. Data only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["certain", "likely", "info"]
_RANKS: Mapping[str, int] = {"certain": 0, "likely": 1, "info": 2}

#: The faults that LLDS code has in the wild, and what each means.
FAULTS: Mapping[str, str] = {
    "L1": "old and new policy are the same, so the penalty is zero by construction",
    "L2": "no gradient reaches the policy through the penalty",
    "L3": "the old log-probs are not those of the policy that sampled",
    "L4": "the response mask is wrong",
    "L5": "the wrong responses are preserved",
    "L6": "the gate looks at the wrong span",
    "L7": "normaliser and λ do not belong together",
    "L8": "the answer mask is absent, empty or inverted",
    "L9": "the penalty is configured but never added",
    "L10": "metrics are those of the last micro-batch only",
    "L11": "missing log-probs were filled with 0",
    "L12": "the penalty is counted twice, or with another regulariser of the same kind",
    "L13": "groups are so small that A >= 0 means little",
    "L14": "a zero is reported bare: structural and measured zero can't be told apart",
}


@dataclass(frozen=True)
class Finding:
    """One fault that was found.

    ``fault``: a key of :data:`FAULTS`. ``severity``: "certain" (the penalty can't work as meant), "likely", or
    "info" (unusual, and may be meant). ``evidence``: one sentence with the numbers. ``setting``: which setting
    or code is concerned. ``change``: what to do.
    """

    fault: str
    severity: Severity
    evidence: str
    setting: str
    change: str

    @property
    def text(self) -> str:
        """The finding as text for people."""
        return (
            f"{self.fault} ({self.severity}): {FAULTS[self.fault]}.\n"
            f"    found:  {self.evidence}\n    where:  {self.setting}\n    change: {self.change}"
        )


@dataclass(frozen=True)
class Report:
    """All findings of a preflight, worst first.

    ``checked``: the faults that were looked for. ``unchecked``: fault -> why it could not be looked for.
    ``notes``: further sentences for people, such as the decoded spans of a batch.
    """

    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    unchecked: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def certain(self) -> tuple[Finding, ...]:
        """The findings that say that the penalty can't work as meant."""
        return tuple(one for one in self.findings if one.severity == "certain")

    @property
    def is_clean(self) -> bool:
        """Whether nothing worse than "info" was found."""
        return all(one.severity == "info" for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "clean": self.is_clean,
            "findings": [{**asdict(one), "meaning": FAULTS[one.fault]} for one in self.findings],
            "checked": list(self.checked),
            "unchecked": dict(self.unchecked),
            "notes": list(self.notes),
        }

    @property
    def text(self) -> str:
        """The report as text for people."""
        lines = [one.text for one in self.findings]
        if not lines:
            lines.append("No fault found.")
        lines.append(f"Looked for: {', '.join(self.checked) or 'nothing'}.")
        lines += [f"Not looked for: {fault}, since {why}." for fault, why in self.unchecked]
        return "\n".join([*lines, *self.notes])


def merge(reports: Iterable[Report]) -> Report:
    """Put reports together: what one of them looked for counts as looked for."""
    parts = list(reports)
    findings = sorted((one for part in parts for one in part.findings), key=_order)
    checked = sorted({fault for part in parts for fault in part.checked}, key=number)
    unchecked = {fault: why for part in parts for fault, why in part.unchecked if fault not in checked}
    notes = tuple(note for part in parts for note in part.notes)
    told = tuple(dict.fromkeys(findings))
    return Report(told, tuple(checked), tuple(sorted(unchecked.items(), key=lambda x: number(x[0]))), notes)


def number(fault: str) -> int:
    """Return the number of a fault, to sort by."""
    return int(fault[1:])


def _order(finding: Finding) -> tuple[int, int]:
    return _RANKS[finding.severity], number(finding.fault)
