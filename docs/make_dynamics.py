"""Write what docs/dynamics.md shows: the table of series, the measured table, the figures.

Run it as ``PYTHONPATH=src python docs/make_dynamics.py``. It needs nothing but llds and takes a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from llds.dynamics import SERIES, Event, PhaseMonitor
from llds.dynamics.synthetic import HARD, HEALTHY, Run, reexploration, sharpening, small_batch, spiral
from llds.files import atomic_write_text

DOCS = Path(__file__).parent
PAGE = DOCS / "dynamics.md"
#: Figure -> the run in it.
FIGURES = {
    "spiral": spiral(1, steps=190),
    "sharpening": sharpening(4),
    "reexploration": reexploration(2),
    "small_batch": small_batch(0),
}
#: The thresholds were chosen on seeds from 1000 on.
RANGES = (range(200), range(200, 400))


def main() -> None:
    """Write the figures and both tables."""
    for name, run in FIGURES.items():
        atomic_write_text(DOCS / "figures" / f"dynamics_{name}.svg", figure(run))
    page = PAGE.read_text("utf-8")
    page = replaced(page, "series", series_table())
    page = replaced(page, "measured", measured_table())
    atomic_write_text(PAGE, page)


def replaced(page: str, mark: str, content: str) -> str:
    """Return ``page`` with ``content`` between the comments that are named by ``mark``."""
    start, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    return page.split(start)[0] + start + content + end + page.split(end)[1]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def series_table() -> str:
    """Return the table of all series."""
    head = ("series", "unit", "definition", "equation", "healthy", "sick")
    return table(
        head,
        ([f"`{s.key}`", s.unit, s.meaning, s.equation, s.healthy, s.sick] for s in SERIES.values()),
    )


def watch(run: Run) -> list[Event]:
    """Return the events of a run."""
    monitor = PhaseMonitor()
    return [event for step, row in enumerate(run.rows) for event in monitor.update(step, row)]


def alarm_of(run: Run) -> Event | None:
    """Return the first alarm of a run."""
    return next((event for event in watch(run) if event.kind == "alarm"), None)


def quantiles(values: Sequence[int]) -> str:
    """Return the median and the range of the middle nine tenths."""
    ordered = sorted(values)
    low, middle, high = (ordered[round(part * (len(ordered) - 1))] for part in (0.05, 0.5, 0.95))
    return f"{middle} ({low} to {high})"


def measured_table() -> str:
    """Run the monitor on both ranges of seeds and return what came out."""
    rows = [
        *(_spirals("spirals", spiral, seeds) for seeds in RANGES),
        *(_spirals("spirals, one optimizer step a rollout", _on_policy, seeds) for seeds in RANGES),
        *(_healthy(kind, make, seeds) for kind, make in (HEALTHY | HARD).items() for seeds in RANGES),
    ]
    head = (
        "runs",
        "seeds",
        "alarms",
        "onset within 10 steps",
        "alarm after onset",
        "alarm before half reward",
    )
    return table(head, rows)


def _on_policy(seed: int) -> Run:
    return spiral(seed, per_rollout=1)


def _spirals(kind: str, make: Callable[[int], Run], seeds: range) -> list[str]:
    runs = [make(seed) for seed in seeds]
    found = [(run, alarm) for run in runs if (alarm := alarm_of(run))]
    near = sum(abs((alarm.onset or 0) - (run.onset or 0)) <= 10 for run, alarm in found)
    delays = [alarm.step - (run.onset or 0) for run, alarm in found]
    # The reward has lost half of its height 18 steps into phase III.
    leads = [(run.acceleration or 0) + 18 - alarm.step for run, alarm in found]
    return [
        kind,
        _text(seeds),
        f"{len(found)} of {len(runs)}",
        f"{near} of {len(runs)}",
        quantiles(delays),
        quantiles(leads),
    ]


def _healthy(kind: str, make: Callable[[int], Run], seeds: range) -> list[str]:
    # A third of each range per kind, so that the three healthy kinds are 200 runs together.
    chosen = (
        [seed for seed in seeds if seed % 3 == list(HEALTHY).index(kind)] if kind in HEALTHY else seeds[:50]
    )
    count = sum(alarm_of(make(seed)) is not None for seed in chosen)
    return [f"healthy: {kind}", _text(seeds), f"{count} of {len(chosen)}", "", "", ""]


def _text(seeds: range) -> str:
    return f"{seeds[0]}–{seeds[-1]}"


# --- figures

WIDTH, PANEL, LEFT, RIGHT, GAP = 640, 80, 64, 10, 18
PANELS = {
    "logprob_correct": "log-prob of correct",
    "rate": "lost per update",
    "entropy": "entropy",
    "reward": "reward",
}
SHADES = ("#e8f0e4", "#fbf0d9", "#f6dcd8")


def figure(run: Run) -> str:
    """Return the picture of a run as SVG: four series, the true phases, and what the monitor said."""
    rows = [{**row, "rate": _rate(row)} for row in run.rows]
    height = GAP + len(PANELS) * (PANEL + GAP) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="10">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, (name, label) in enumerate(PANELS.items()):
        points = [(step, value) for step, row in enumerate(rows) if (value := row.get(name)) is not None]
        parts += _panel(run, label, points, GAP + index * (PANEL + GAP))
    parts += _marks(run, height)
    return "\n".join([*parts, "</svg>\n"])


def _rate(row: dict[str, float | None]) -> float | None:
    lost, updates = row["displacement_correct"], row["updates_since_rollout"]
    return lost / updates if lost is not None and updates else None


def _x(run: Run, step: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / len(run.rows)


def _panel(run: Run, label: str, points: list[tuple[int, float]], top: int) -> list[str]:
    values = sorted(value for _, value in points)
    # Single outliers must not flatten the rest.
    low, high = values[len(values) // 200], values[-1 - len(values) // 200]

    def y(value: float) -> float:
        return top + PANEL * (1 - (min(high, max(low, value)) - low) / ((high - low) or 1.0))

    parts = _shades(run, top)
    line = " ".join(f"{_x(run, step):.1f},{y(value):.1f}" for step, value in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#24476b" stroke-width="1"/>')
    for value, below in ((low, 0), (high, 8)):
        place = f'x="{LEFT - 4}" y="{y(value) + below:.0f}" text-anchor="end"'
        parts.append(f'<text {place} fill="#555">{value:.3g}</text>')
    parts.append(f'<text x="{LEFT}" y="{top - 4}" fill="#222">{label}</text>')
    return parts


def _shades(run: Run, top: int) -> list[str]:
    changes = [step for step in (0, run.onset, run.acceleration, len(run.rows)) if step is not None]
    parts = []
    for (start, end), shade in zip(pairwise(changes), SHADES, strict=False):
        left, width = _x(run, start), _x(run, end) - _x(run, start)
        parts.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{PANEL}" fill="{shade}"/>')
    return parts


def _marks(run: Run, height: int) -> list[str]:
    alarm = alarm_of(run)
    bottom = height - 34
    marks = []
    if alarm:
        marks.append((alarm.onset or 0, "onset found", "end", "#8a6d00"))
        marks.append((alarm.step, "alarm", "start", "#a01010"))
    parts = []
    for step, text, anchor, colour in marks:
        x = f"{_x(run, step):.1f}"
        ends = f'x1="{x}" x2="{x}" y1="{GAP}" y2="{bottom}"'
        parts.append(f'<line {ends} stroke="{colour}" stroke-dasharray="4 3"/>')
        place = f'x="{x}" y="{bottom + 12}" text-anchor="{anchor}"'
        parts.append(f'<text {place} fill="{colour}">{text} {step}</text>')
    true = "; shading: true phases I, II, III" if run.onset else "; no alarm" if alarm is None else ""
    caption = f"Synthetic run ({run.kind}, seed {run.seed}), {len(run.rows)} optimizer steps{true}."
    return [*parts, f'<text x="{LEFT}" y="{height - 8}" fill="#222">{caption}</text>']


if __name__ == "__main__":
    main()
