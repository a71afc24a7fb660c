"""A diagnosis as one HTML page that needs nothing else: words, charts, and every series of the log."""

from __future__ import annotations

import json

from llds.diagnosis.findings import Diagnosis, Finding
from llds.diagnosis.schema import to_json
from llds.diagnosis.table import Table
from llds.diagnosis.telling import about, headline, shown_series, summary
from llds.diagnosis.vocabulary import SERIES
from llds.pages import badge, charts, document, escape, folded, items, section
from llds.plots import Mark, line_chart

_MOST_CHARTS = 120


def html_page(diagnosis: Diagnosis, table: Table) -> str:
    """Return the page. Every text of the log is escaped; nothing is loaded from anywhere."""
    title = f"{diagnosis.severity}: {headline(diagnosis)}"
    first = shown_series(table, diagnosis)
    usual = [name for name in first if name in SERIES][:12]
    others = [name for name in table.columns if name not in usual][: _MOST_CHARTS - len(usual)]
    data = json.dumps(to_json(diagnosis, table), ensure_ascii=False).replace("<", "\\u003c")
    body = [
        f"<h1>{badge(diagnosis.severity)} {escape(headline(diagnosis))}</h1>",
        f"<p>{escape(summary(diagnosis))}</p>",
        f'<p class="dim">{escape(about(table))}</p>',
        section("What to change", [line for one in diagnosis.findings[:1] for line in one.advice]),
        charts([series_chart(name, table, diagnosis) for name in usual]),
        *(finding_section(one) for one in diagnosis.findings),
        section("What it was not", [f"{one.kind}: {one.why}" for one in diagnosis.ruled_out]),
        section("What this log cannot tell", [one.sentence for one in diagnosis.missing]),
        section("Notes", diagnosis.notes),
        folded(
            f"All other series ({len(others)})",
            charts([series_chart(name, table, diagnosis) for name in others]),
        ),
        f'<script type="application/json" id="diagnosis">{data}</script>',
    ]
    return document(title, body)


def finding_section(finding: Finding) -> str:
    """Return one finding with its evidence."""
    head = f"<h2>{badge(finding.severity)} {escape(finding.title)}</h2>"
    return f"{head}<p>{escape(finding.explanation)}</p>{items([one.evidence for one in finding.signals])}"


def series_chart(name: str, table: Table, diagnosis: Diagnosis) -> str:
    """Return the chart of a series with the onset marked; nothing where it has no finite value."""
    column = table.columns[name]
    unit = SERIES[name].unit if name in SERIES else ""
    label = name if name == column.key else f"{name} ({column.key})"
    lines = [(name, column.values.tolist())]
    return line_chart(label, unit, table.steps.tolist(), lines, marks=_marks(diagnosis), points=400)


def _marks(diagnosis: Diagnosis) -> list[Mark]:
    if diagnosis.onset_step is None:
        return []
    first = diagnosis.findings[0]
    marks = [Mark(diagnosis.onset_step, None, f"step {diagnosis.onset_step}")]
    if first.onset_interval and first.onset_interval[1] > first.onset_interval[0]:
        marks.insert(0, Mark(first.onset_interval[0], first.onset_interval[1]))
    return marks
