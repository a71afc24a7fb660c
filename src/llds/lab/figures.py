"""Pictures of stored runs as SVG, drawn without a plotting library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from llds.lab.analysis import Floats, Roc, Summary, levels
from llds.lab.series import StoredRun

INK, FAINT, GRID = "#1f2328", "#6e7781", "#d8dee4"
COLOURS = ("#c0392b", "#1f6fb2", "#2e8b57", "#8e5ea2", "#d08700", "#17869e", "#7f5539", "#555555")

#: Panels of the main figure: series, caption, smallest extent of the axis.
PANELS = (
    ("reward", "reward (exact match)", 0.1),
    ("logprob_correct", "log-prob of correct, nats/token", 0.1),
    ("displacement_correct", "displacement of correct, nats/token", 0.02),
    ("policy_entropy", "entropy, nats/token", 0.1),
    ("grad_norm", "gradient norm", 0.1),
    ("searches", "searches per response", 1.0),
    ("action_tokens", "tokens per response", 10.0),
    ("kl", "KL to the start, nats/token", 0.1),
)


@dataclass(frozen=True)
class Box:
    """A plot area in pixels and the values at its edges."""

    left: float
    top: float
    width: float
    height: float
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        """Return the pixel of a value on the horizontal axis."""
        return self.left + self.width * (value - self.x0) / ((self.x1 - self.x0) or 1.0)

    def y(self, value: float) -> float:
        """Return the pixel of a value on the vertical axis, cut at the edges."""
        share = (min(max(value, self.y0), self.y1) - self.y0) / ((self.y1 - self.y0) or 1.0)
        return self.top + self.height * (1 - share)


def text(x: float, y: float, words: str, size: int = 11, anchor: str = "start", fill: str = INK) -> str:
    """Return a line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(words)}</text>"
    )


def line(
    points: Iterable[tuple[float, float]], colour: str, width: float, opacity: float = 1.0, dash: str = ""
) -> str:
    """Return a line through points in pixels; ``dash``: lengths of dashes and gaps, solid without."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}" stroke-linejoin="round"'
        + (f' stroke-dasharray="{dash}"/>' if dash else "/>")
    )


def document(width: int, height: int, parts: Iterable[str]) -> str:
    """Return a whole picture."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def curves(title: str, arms: Mapping[str, Sequence[StoredRun]]) -> str:
    """Draw every series of :data:`PANELS` against rollouts: thin for each seed, bold for their mean."""
    width, columns, high, gap = 900, 2, 130, 40
    rows = -(-len(PANELS) // columns)
    height = 60 + rows * (high + gap) + 10
    parts = [text(16, 24, title, 15)]
    parts += _legend(16, 44, list(arms))
    wide = (width - 60 * columns - 16) / columns
    for index, (name, caption, extent) in enumerate(PANELS):
        left = 56 + (index % columns) * (wide + 60)
        top = 76 + (index // columns) * (high + gap)
        parts += _panel(name, caption, extent, arms, left, top, wide, high)
    return document(width, height, parts)


def _legend(x: float, y: float, names: Sequence[str]) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        colour = COLOURS[index % len(COLOURS)]
        parts += [line([(x, y - 4), (x + 18, y - 4)], colour, 3), text(x + 23, y, name, 12)]
        x += 23 + 7.5 * len(name) + 22
    return parts


def _panel(
    name: str,
    caption: str,
    extent: float,
    arms: Mapping[str, Sequence[StoredRun]],
    left: float,
    top: float,
    wide: float,
    high: float,
) -> list[str]:
    smooth = {arm: [levels(run[name], 5) for run in runs] for arm, runs in arms.items()}
    every = np.concatenate([curve[np.isfinite(curve)] for curves_ in smooth.values() for curve in curves_])
    if not every.size:
        return []
    # Single outliers must not flatten the rest.
    low, top_value = (float(value) for value in np.quantile(every, [0.01, 0.97]))
    low = min(low, 0.0) if low >= 0 else low
    top_value = max(top_value, low + extent)
    length = max(len(curve) for curves_ in smooth.values() for curve in curves_)
    box = Box(left, top, wide, high, 0, length - 1, low, top_value)
    parts = _axes(box, caption)
    for index, curves_ in enumerate(smooth.values()):
        colour = COLOURS[index % len(COLOURS)]
        parts += [line(_pixels(box, curve), colour, 0.8, 0.3) for curve in curves_]
        if curves_:
            parts.append(line(_pixels(box, _mean(curves_)), colour, 2.4))
    return parts


def _axes(box: Box, caption: str) -> list[str]:
    parts = [text(box.left, box.top - 6, caption, 11, fill=INK)]
    for value in (box.y0, (box.y0 + box.y1) / 2, box.y1):
        y = box.y(value)
        parts.append(line([(box.left, y), (box.left + box.width, y)], GRID, 1))
        parts.append(text(box.left - 5, y + 4, f"{value:.3g}", 10, "end", FAINT))
    bottom = box.top + box.height + 13
    ticks = (box.x0, (box.x0 + box.x1) // 2, box.x1)
    return parts + [text(box.x(value), bottom, f"{value:g}", 10, "middle", FAINT) for value in ticks]


def _pixels(box: Box, curve: Floats) -> list[tuple[float, float]]:
    return [(box.x(i), box.y(float(value))) for i, value in enumerate(curve) if np.isfinite(value)]


def _mean(curves_: Sequence[Floats]) -> Floats:
    length = min(len(curve) for curve in curves_)
    stacked = np.stack([curve[:length] for curve in curves_])
    counts = np.isfinite(stacked).sum(0)
    sums = np.where(np.isfinite(stacked), stacked, 0.0).sum(0)
    # The mean of the few seeds that still have a value would jump about.
    return np.where(counts * 2 > len(stacked), sums / np.maximum(counts, 1), np.nan)


def forest(title: str, arms: Mapping[str, tuple[Summary, Sequence[float]]]) -> str:
    """Draw the final reward of each arm: a dot per seed, a bar for the interval of the mean."""
    width, step = 760, 22
    height = 70 + step * len(arms) + 20
    most = max([0.05, *(value for _, finals in arms.values() for value in finals)])
    box = Box(210, 44, width - 210 - 130, step * len(arms), 0.0, most, 0, 1)
    parts = [text(16, 24, title, 15)]
    for value in np.linspace(0, most, 5):
        x = box.x(float(value))
        parts.append(line([(x, box.top), (x, box.top + box.height)], GRID, 1))
        parts.append(text(x, box.top + box.height + 16, f"{value:.2f}", 10, "middle", FAINT))
    for index, (name, (summary, finals)) in enumerate(arms.items()):
        y = box.top + step * (index + 0.5)
        parts.append(text(box.left - 8, y + 4, name, 12, "end"))
        parts += [f'<circle cx="{box.x(v):.1f}" cy="{y:.1f}" r="2.6" fill="#9ec5e8"/>' for v in finals]
        final = summary.final
        parts.append(line([(box.x(final.low), y), (box.x(final.high), y)], COLOURS[1], 2.5))
        parts.append(f'<circle cx="{box.x(final.value):.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[1]}"/>')
        dead = round(summary.collapsed.value * summary.runs)
        parts.append(text(width - 120, y + 4, f"{dead} of {summary.runs} collapsed", 10, fill=FAINT))
    return document(width, height, parts)


def roc_curves(title: str, rocs: Sequence[Roc], monitor: tuple[float, float] | None) -> str:
    """Draw ROC curves in one square, best first in the legend; ``monitor``: false alarms, alarms in time."""
    size, left, top = 420, 56, 44
    box = Box(left, top, size, size, 0, 1, 0, 1)
    beside = left + size + 20
    parts = [text(16, 24, title, 15), line([(left, top + size), (left + size, top)], GRID, 1)]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(line([(left, box.y(value)), (left + size, box.y(value))], GRID, 0.7))
        parts.append(text(left - 6, box.y(value) + 4, f"{value:g}", 10, "end", FAINT))
        parts.append(text(box.x(value), top + size + 15, f"{value:g}", 10, "middle", FAINT))
    parts.append(text(left + size / 2, top + size + 32, "false alarms in runs that held", 11, "middle"))
    for index, one in enumerate(sorted(rocs, key=lambda one: -one.area)):
        colour = COLOURS[index % len(COLOURS)]
        dash = "" if index < len(COLOURS) else "4 3"
        y = top + 14.0 + 20 * index
        parts.append(line([(box.x(x), box.y(share)) for x, share in one.points], colour, 1.8, dash=dash))
        parts.append(line([(beside, y - 4), (beside + 20, y - 4)], colour, 3, dash=dash))
        parts.append(text(beside + 26, y, f"{one.signal}: {one.area:.2f}", 12))
    if monitor is not None:
        y = top + 14.0 + 20 * len(rocs)
        parts += [_square(box.x(monitor[0]), box.y(monitor[1])), _square(beside + 10, y - 4)]
        parts.append(text(beside + 26, y, "alarm of the phase monitor", 12))
    return document(760, top + size + 44, parts)


def _square(x: float, y: float) -> str:
    return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" fill="{INK}"/>'
