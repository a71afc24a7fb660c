"""A diagnosis as JSON, by a schema with a version. What ``llds diagnose --json`` prints."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from llds.diagnosis.findings import CLASSES, SEVERITIES, Diagnosis, Finding
from llds.diagnosis.table import Table

#: Raised when a key changes its meaning or goes; new keys may come without.
VERSION = 1


def to_json(diagnosis: Diagnosis, table: Table) -> dict[str, Any]:
    """Return a diagnosis as plain JSON values; numbers that are not finite are null."""
    first = diagnosis.first_signal
    content = {
        "schema": VERSION,
        "verdict": diagnosis.verdict,
        "severity": diagnosis.severity,
        "onset_step": diagnosis.onset_step,
        "onset_interval": _interval(diagnosis),
        "first_signal": None if first is None else asdict(first),
        "lead_steps": diagnosis.findings[0].lead_steps if diagnosis.findings else None,
        "confidence": diagnosis.findings[0].confidence if diagnosis.findings else None,
        "steps": diagnosis.steps,
        "first_step": diagnosis.first_step,
        "last_step": diagnosis.last_step,
        "findings": [_finding(one) for one in diagnosis.findings],
        "ruled_out": [asdict(one) for one in diagnosis.ruled_out],
        "missing": [{**asdict(one), "series": list(one.series)} for one in diagnosis.missing],
        "notes": list(diagnosis.notes),
        "log": {
            "format": table.format,
            "engine": table.engine,
            "files": list(table.files),
            "rows_read": table.rows_read,
            "lines_read": table.lines_read,
            "damaged_lines": table.damaged_count,
            "damaged": [asdict(one) for one in table.damaged],
            "resumes": [asdict(one) for one in table.resumes],
            "series": {name: column.key for name, column in table.columns.items()},
        },
    }
    finite = _finite(content)
    assert isinstance(finite, dict)
    return finite


def _interval(diagnosis: Diagnosis) -> list[int] | None:
    first = diagnosis.findings[0] if diagnosis.findings else None
    is_verdict = first is not None and first.kind == diagnosis.verdict and first.onset_interval is not None
    return list(first.onset_interval) if is_verdict and first and first.onset_interval else None


def _finding(finding: Finding) -> dict[str, Any]:
    content = asdict(finding)
    content["signals"] = [asdict(one) for one in finding.signals]
    content["onset_interval"] = None if finding.onset_interval is None else list(finding.onset_interval)
    content["advice"] = list(finding.advice)
    return content


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


_SIGNAL = {
    "type": "object",
    "required": ["series", "family", "step", "direction", "evidence"],
    "properties": {
        "series": {"type": "string"},
        "family": {"type": "string"},
        "step": {"type": "integer"},
        "direction": {"enum": ["up", "down", "stuck", "nan"]},
        "baseline": {"type": ["number", "null"]},
        "value": {"type": ["number", "null"]},
        "evidence": {"type": "string"},
    },
}
_STEP = {"type": ["integer", "null"]}
#: The schema itself (JSON Schema, 2020-12).
JSON_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "llds diagnose --json",
    "type": "object",
    "required": [
        *(
            "schema",
            "verdict",
            "severity",
            "onset_step",
            "first_signal",
            "steps",
            "findings",
            "missing",
            "ruled_out",
        ),
        *("notes", "log"),
    ],
    "properties": {
        "schema": {"const": VERSION},
        "verdict": {"enum": list(CLASSES)},
        "severity": {"enum": list(SEVERITIES)},
        "onset_step": _STEP,
        "onset_interval": {
            "type": ["array", "null"],
            "items": {"type": "integer"},
            "minItems": 2,
            "maxItems": 2,
        },
        "first_signal": {"anyOf": [{"type": "null"}, _SIGNAL]},
        "lead_steps": _STEP,
        "confidence": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "steps": {"type": "integer", "minimum": 0},
        "first_step": _STEP,
        "last_step": _STEP,
        "findings": {
            "type": "array",
            "items": {
                "type": "object",
                "required": [
                    "kind",
                    "severity",
                    "title",
                    "onset_step",
                    "signals",
                    "confidence",
                    "explanation",
                    "advice",
                ],
                "properties": {
                    "kind": {"enum": list(CLASSES)},
                    "severity": {"enum": list(SEVERITIES)},
                    "onset_step": _STEP,
                    "lead_steps": _STEP,
                    "signals": {"type": "array", "items": _SIGNAL},
                    "advice": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
        "missing": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["kind", "series", "sentence"],
                "properties": {"series": {"type": "array", "items": {"type": "string"}}},
            },
        },
        "log": {"type": "object", "required": ["format", "engine", "files", "damaged_lines", "series"]},
    },
}
