"""A diagnosis as one HTML page that needs nothing else: words, charts, and every series of the log."""

from __future__ import annotations

import html
import json
import math

from llds.diagnosis.findings import Diagnosis, Finding
from llds.diagnosis.schema import to_json
from llds.diagnosis.table import Table
from llds.diagnosis.telling import about, headline, shown_series, summary
from llds.diagnosis.vocabulary import SERIES
from llds.plots import Mark, line_chart

_MOST_CHARTS = 120

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#656d76;--paper:#fff;--card:#f6f8fa;--grid:#d8dee4;--l0:#0b5394;
--l1:#b45f06;--l2:#38761d;--l3:#741b47;--ok:#1a7f37;--info:#0969da;--warning:#9a6700;--critical:#cf222e;--band:#cf222e22}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#8d96a0;--paper:#0d1117;--card:#161b22;--grid:#30363d;
--l0:#6cb6ff;--l1:#f0a060;--l2:#7ee787;--l3:#e2a5c8;--ok:#3fb950;--info:#58a6ff;--warning:#d29922;--critical:#ff7b72;
--band:#ff7b7233}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
max-width:1180px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.7rem;margin:0}h2{font-size:1.15rem;margin-top:2rem}.dim,.unit{color:var(--dim)}
.badge{display:inline-block;padding:.1rem .6rem;border-radius:1rem;color:#fff;font-size:.85rem;font-weight:600}
.ok{background:var(--ok)}.info{background:var(--info)}.warning{background:var(--warning)}.critical{background:var(--critical)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:1rem}
figure{margin:0;background:var(--card);border-radius:8px;padding:.5rem}svg{width:100%;height:auto;display:block}
svg text{fill:var(--ink);font:11px system-ui,sans-serif}
svg .title{font-size:12.5px;font-weight:600}svg .unit{fill:var(--dim);font-weight:400}
svg .tick{fill:var(--dim)}.grid{stroke:var(--grid);fill:none}.line{fill:none;stroke-width:1.5}.l0{stroke:var(--l0)}
.l1{stroke:var(--l1)}.l2{stroke:var(--l2)}.l3{stroke:var(--l3)}.band{fill:var(--band)}
.mark{stroke:var(--critical);stroke-dasharray:4 3;fill:none}
details{margin-top:1rem}summary{cursor:pointer;font-weight:600}li{margin:.15rem 0}
@media print{details{display:block}body{max-width:none}}
"""


def html_page(diagnosis: Diagnosis, table: Table) -> str:
    """Return the page. Every text of the log is escaped; nothing is loaded from anywhere."""
    title = f"{diagnosis.severity}: {headline(diagnosis)}"
    first = shown_series(table, diagnosis)
    usual = [name for name in first if name in SERIES][:12]
    others = [name for name in table.columns if name not in usual][: _MOST_CHARTS - len(usual)]
    body = [
        f'<h1><span class="badge {diagnosis.severity}">{diagnosis.severity}</span> {_e(headline(diagnosis))}</h1>',
        f"<p>{_e(summary(diagnosis))}</p>",
        f'<p class="dim">{_e(about(table))}</p>',
        _section("What to change", [line for one in diagnosis.findings[:1] for line in one.advice]),
        f'<div class="charts">{"".join(_chart(name, table, diagnosis) for name in usual)}</div>',
        *(_finding(one) for one in diagnosis.findings),
        _section("What it was not", [f"{one.kind}: {one.why}" for one in diagnosis.ruled_out]),
        _section("What this log cannot tell", [one.sentence for one in diagnosis.missing]),
        _section("Notes", list(diagnosis.notes)),
        f"<details><summary>All other series ({len(others)})</summary>"
        f'<div class="charts">{"".join(_chart(name, table, diagnosis) for name in others)}</div></details>',
    ]
    data = json.dumps(to_json(diagnosis, table), ensure_ascii=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_e(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}"
        f'<script type="application/json" id="diagnosis">{data}</script></body></html>\n'
    )


def _finding(finding: Finding) -> str:
    lines = [signal.evidence for signal in finding.signals]
    head = f'<h2><span class="badge {finding.severity}">{finding.severity}</span> {_e(finding.title)}</h2>'
    return f"{head}<p>{_e(finding.explanation)}</p>{_items(lines)}"


def _section(title: str, lines: list[str]) -> str:
    return f"<h2>{_e(title)}</h2>{_items(lines)}" if lines else ""


def _items(lines: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{_e(line)}</li>' for line in lines)}</ul>" if lines else ""


def _chart(name: str, table: Table, diagnosis: Diagnosis) -> str:
    column = table.columns[name]
    if not any(math.isfinite(value) for value in column.values):
        return ""
    unit = SERIES[name].unit if name in SERIES else ""
    label = name if name == column.key else f"{name} ({column.key})"
    chart = line_chart(
        label,
        unit,
        table.steps.tolist(),
        [(name, column.values.tolist())],
        marks=_marks(diagnosis),
        points=400,
    )
    return f"<figure>{chart}</figure>" if chart else ""


def _marks(diagnosis: Diagnosis) -> list[Mark]:
    if diagnosis.onset_step is None:
        return []
    first = diagnosis.findings[0]
    marks = [Mark(diagnosis.onset_step, None, f"step {diagnosis.onset_step}")]
    if first.onset_interval and first.onset_interval[1] > first.onset_interval[0]:
        marks.insert(0, Mark(first.onset_interval[0], first.onset_interval[1]))
    return marks


def _e(text: str) -> str:
    return html.escape(text)
