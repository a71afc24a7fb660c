"""Line charts as SVG text: pure functions from numbers to a picture, without a plotting library."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: From a place on the axes to one in the picture.
Place = Callable[[float, float], tuple[float, float]]
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 26, 22


@dataclass(frozen=True)
class Mark:
    """A place on the horizontal axis to show: a line at ``at``, or a band up to ``end``."""

    at: float
    end: float | None = None
    label: str = ""


def line_chart(
    title: str,
    unit: str,
    x: Sequence[float],
    lines: Sequence[tuple[str, Sequence[float]]],
    *,
    marks: Sequence[Mark] = (),
    behind: Sequence[tuple[str, Sequence[float]]] = (),
    legend: bool = False,
    width: int = 560,
    height: int = 170,
    points: int = 600,
) -> str:
    """Return one chart as an ``<svg>`` element; colours come from the page's CSS.

    ``lines``: label and values, NaN where there is none. Long lines are thinned to ``points``, keeping extremes.
    ``behind``: lines drawn faintly behind those of the same place, such as what they are the means of.
    ``legend``: write the labels beside the title.
    """
    known = [value for _, values in [*behind, *lines] for value in values if math.isfinite(value)]
    if not known or not x:
        return ""
    low, high = _bounds(known)
    first, last = float(min(x)), float(max(x))
    last = last if last > first else first + 1
    inner_w, inner_h = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def place(at: float, value: float) -> tuple[float, float]:
        across = _LEFT + inner_w * (at - first) / (last - first)
        return across, _TOP + inner_h * (1 - (value - low) / (high - low))

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="16">{html.escape(title)} '
        f'<tspan class="unit">{html.escape(unit)}</tspan></text>',
    ]
    parts += _marks(marks, place, first, last, low, high)
    parts += _axes(place, first, last, low, high)
    if legend:
        parts.append(_legend([label for label, _ in lines], width))
    for style, group in (("line faint", behind), ("line", lines)):
        for number, (label, values) in enumerate(group):
            parts += _paths(label, f"{style} l{number % 4}", _runs(x, values, points), place)
    return "".join([*parts, "</svg>"])


def _legend(labels: Sequence[str], width: int) -> str:
    words = "".join(
        f'<tspan class="k{number % 4}" dx="8">{html.escape(label)}</tspan>'
        for number, label in enumerate(labels)
    )
    return f'<text x="{width - _RIGHT}" y="16" text-anchor="end">{words}</text>'


def _paths(label: str, style: str, runs: Sequence[Sequence[tuple[float, float]]], place: Place) -> list[str]:
    paths = []
    for run in runs:
        path = " ".join(
            f"{'M' if i == 0 else 'L'}{px:.1f},{py:.1f}" for i, (px, py) in enumerate(place(*p) for p in run)
        )
        paths.append(f'<path class="{style}" d="{path}"><title>{html.escape(label)}</title></path>')
    return paths


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = max(abs(high) * 0.05, 1e-6)
        return low - pad, high + pad
    return low - 0.04 * (high - low), high + 0.04 * (high - low)


def _axes(place: Place, first: float, last: float, low: float, high: float) -> list[str]:
    parts = []
    for value in ticks(low, high, 4):
        px, py = place(first, value)
        end = place(last, value)[0]
        parts.append(f'<path class="grid" d="M{px:.1f},{py:.1f}H{end:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{px - 6:.1f}" y="{py + 3.5:.1f}" text-anchor="end">{short_number(value)}</text>'
        )
    for value in ticks(first, last, 6):
        px, py = place(value, low)
        parts.append(
            f'<text class="tick" x="{px:.1f}" y="{py + 15:.1f}" text-anchor="middle">{short_number(value)}</text>'
        )
    return parts


def _marks(
    marks: Sequence[Mark], place: Place, first: float, last: float, low: float, high: float
) -> list[str]:
    parts = []
    for mark in marks:
        start = min(max(mark.at, first), last)
        px, bottom = place(start, low)
        top = place(start, high)[1]
        if mark.end is not None:
            wide = max(place(min(max(mark.end, start), last), low)[0] - px, 1)
            box = f'x="{px:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{bottom - top:.1f}"'
            parts.append(f'<rect class="band" {box}/>')
        else:
            parts.append(f'<path class="mark" d="M{px:.1f},{top:.1f}V{bottom:.1f}"/>')
        if mark.label:
            anchor, shift = ("end", -4) if start > (first + last) / 2 else ("start", 4)
            at = f'x="{px + shift:.1f}" y="{top + 10:.1f}" text-anchor="{anchor}"'
            parts.append(f'<text class="tick" {at}>{html.escape(mark.label)}</text>')
    return parts


def _runs(x: Sequence[float], values: Sequence[float], points: int) -> list[list[tuple[float, float]]]:
    """Cut a line at its holes, and thin it: of each stretch the first, the least and the greatest value stay."""
    whole = [(float(a), float(v)) for a, v in zip(x, values, strict=True) if math.isfinite(v)]
    if len(whole) > points:
        size = -(-2 * len(whole) // points)
        kept: list[tuple[float, float]] = []
        for start in range(0, len(whole), size):
            stretch = whole[start : start + size]
            extremes = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
            kept += sorted(extremes)
        whole = kept
    return [whole] if whole else []


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers between two numbers."""
    raw = (high - low) / max(1, count)
    if not math.isfinite(raw) or raw <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    start = math.ceil(low / step)
    return [
        round(index * step, 12)
        for index in range(start, start + 2 * count + 2)
        if index * step <= high + 1e-12
    ]


def short_number(value: float) -> str:
    """Return a number as few characters: 1200 as 1.2k."""
    size = abs(value)
    if size >= 1e6 or (0 < size < 1e-3):
        return f"{value:.1e}"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.4g}"


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """Return values as one line of ``width`` characters; a space where there is none."""
    glyphs = "_.-=*#" if ascii_only else "▁▂▃▄▅▆▇█"
    known = [value for value in values if math.isfinite(value)]
    if not known or not width:
        return " " * width
    low, high = min(known), max(known)
    cells = []
    for cell in range(width):
        start, end = (
            cell * len(values) // width,
            max((cell + 1) * len(values) // width, cell * len(values) // width + 1),
        )
        part = [value for value in values[start:end] if math.isfinite(value)]
        if not part:
            cells.append(" ")
            continue
        middle = sorted(part)[len(part) // 2]
        share = 0.0 if high == low else (middle - low) / (high - low)
        cells.append(glyphs[min(len(glyphs) - 1, int(share * len(glyphs)))])
    return "".join(cells)
