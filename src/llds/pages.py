"""HTML pages that need nothing else: one style, escaped text, no script, nothing loaded from anywhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#656d76;--paper:#fff;--card:#f6f8fa;--grid:#d8dee4;--l0:#0b5394;
--l1:#b45f06;--l2:#38761d;--l3:#741b47;--ok:#1a7f37;--info:#0969da;--warning:#9a6700;--critical:#cf222e;--band:#cf222e22;
--lost:207,34,46;--won:9,105,218}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#8d96a0;--paper:#0d1117;--card:#161b22;--grid:#30363d;
--l0:#6cb6ff;--l1:#f0a060;--l2:#7ee787;--l3:#e2a5c8;--ok:#3fb950;--info:#58a6ff;--warning:#d29922;--critical:#ff7b72;
--band:#ff7b7233;--lost:255,123,114;--won:88,166,255}}
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
.faint{opacity:.35;stroke-width:1}svg .k0{fill:var(--l0)}svg .k1{fill:var(--l1)}svg .k2{fill:var(--l2)}
svg .k3{fill:var(--l3)}
.mark{stroke:var(--critical);stroke-dasharray:4 3;fill:none}
table{border-collapse:collapse;display:block;overflow-x:auto}
th,td{text-align:left;padding:.25rem .8rem .25rem 0;vertical-align:top;border-bottom:1px solid var(--grid)}
details{margin-top:1rem}summary{cursor:pointer;font-weight:600}li{margin:.15rem 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere}
@media print{details{display:block}body{max-width:none}}
"""


def escape(text: object) -> str:
    """Return a text in which nothing is a tag."""
    return html.escape(str(text))


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """Return a page; ``body``: its parts, as HTML; ``style``: CSS besides that of every page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>{''.join(body)}</body></html>\n"
    )


def badge(severity: str, text: str = "") -> str:
    """Return a word on its colour; ``severity``: ok, info, warning or critical."""
    return f'<span class="badge {severity}">{escape(text or severity)}</span>'


def section(title: str, lines: Sequence[str]) -> str:
    """Return a heading and a list; nothing without lines."""
    return f"<h2>{escape(title)}</h2>{items(lines)}" if lines else ""


def items(lines: Sequence[str]) -> str:
    """Return a list; nothing without lines."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def folded(title: str, inside: str) -> str:
    """Return something that opens on a click; nothing when there is nothing inside."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>" if inside else ""


def rows(head: Sequence[str], cells: Sequence[Sequence[object]]) -> str:
    """Return a table of text; nothing without rows."""
    if not cells:
        return ""
    top = "".join(f"<th>{escape(one)}</th>" for one in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(one)}</td>' for one in line)}</tr>" for line in cells)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"


def charts(pictures: Sequence[str]) -> str:
    """Return SVG pictures side by side; empty ones are left out."""
    inside = "".join(f"<figure>{one}</figure>" for one in pictures if one)
    return f'<div class="charts">{inside}</div>' if inside else ""
