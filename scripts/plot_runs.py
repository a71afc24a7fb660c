"""Draw finished runs of one recipe with several seeds: reward per rollout, and exact match before and after.

    python scripts/plot_runs.py docs/images/tiny.svg runs/tiny-seed*

Also prints the table of the runs. Plain SVG, no plotting library.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

WIDTH, HEIGHT, TOP, BOTTOM = 860, 320, 48, 44
LEFT_PANEL, RIGHT_PANEL = (56, 500), (592, 815)
INK, GRID, SEED, MEAN = "#1f2328", "#d8dee4", "#9ec5e8", "#0b5394"
COLOURS = {"one-hop": "#b45f06", "all": "#0b5394", "two-hop": "#38761d"}


def read_lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def rewards(run: Path) -> list[float]:
    return [row["reward"] for row in read_lines(run / "metrics.jsonl") if "reward" in row]


def exact_match(result: dict, name: str, group: str) -> float:
    return 100 * result["evaluations"][name]["groups"][group]["exact_match"]["value"]


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    anchor: str = "middle",
    fill: str = INK,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{words}</text>'
    )


def line(points: Iterable[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"'
    return f'<polyline points="{path}" {style}/>'


def height(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


def axis(panel: tuple[int, int], top: float, ticks: Sequence[float], title: str, unit: str) -> list[str]:
    parts = [text(panel[0], 24, title, size=14, anchor="start", weight="bold")]
    for tick in ticks:
        y = height(tick, top)
        parts.append(line([(panel[0], y), (panel[1], y)], GRID, 1))
        parts.append(text(panel[0] - 8, y + 4, f"{tick:g}{unit}", anchor="end"))
    return parts


def reward_panel(series: list[list[float]]) -> list[str]:
    x0, x1 = LEFT_PANEL
    count = len(series[0])

    def points(values: Sequence[float]) -> list[tuple[float, float]]:
        return [(x0 + (x1 - x0) * i / (count - 1), height(value, 1)) for i, value in enumerate(values)]

    parts = axis(LEFT_PANEL, 1, [0, 0.25, 0.5, 0.75, 1], "Training reward (exact match, sampled)", "")
    parts += [line(points(values), SEED, 1.2) for values in series]
    mean = [statistics.mean(column) for column in zip(*series, strict=True)]
    parts.append(line(points(mean), MEAN, 3))
    parts.append(
        text(
            (x0 + x1) / 2, HEIGHT - 10, f"rollout, 1 to {count}; thin: {len(series)} seeds, bold: their mean"
        )
    )
    return parts


def gain_panel(results: list[dict]) -> list[str]:
    x0, x1 = RIGHT_PANEL
    parts = axis(RIGHT_PANEL, 100, [0, 25, 50, 75, 100], "Held-out exact match (greedy)", " %")
    for group, colour in COLOURS.items():
        pairs = [(exact_match(one, "before", group), exact_match(one, "after", group)) for one in results]
        parts += [line([(x0 + 40, height(a, 100)), (x1 - 70, height(b, 100))], colour, 1) for a, b in pairs]
        before, after = (statistics.mean(column) for column in zip(*pairs, strict=True))
        ends = [(x0 + 40, height(before, 100)), (x1 - 70, height(after, 100))]
        parts.append(line(ends, colour, 3))
        parts.append(
            text(
                x1 - 62, ends[1][1] + 4, f"{group} {after:.0f} %", anchor="start", fill=colour, weight="bold"
            )
        )
    parts.append(text(x0 + 40, HEIGHT - 10, "before"))
    parts.append(text(x1 - 70, HEIGHT - 10, "after"))
    return parts


def table(runs: list[Path], results: list[dict]) -> str:
    rows = [
        "| run | before | after | gain | one-hop | two-hop | search off, after | searches |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run, one in zip(runs, results, strict=True):
        before, after = exact_match(one, "before", "all"), exact_match(one, "after", "all")
        hops = [
            f"{exact_match(one, 'before', g):.1f} → {exact_match(one, 'after', g):.1f}"
            for g in ("one-hop", "two-hop")
        ]
        off = exact_match(one, "after-without-retriever", "all")
        searches = [one["evaluations"][name]["groups"]["all"]["searches"] for name in ("before", "after")]
        rows.append(
            f"| {run.name} | {before:.1f} | {after:.1f} | {after - before:+.1f} | {hops[0]} "
            f"| {hops[1]} | {off:.1f} | {searches[0]:.2f} → {searches[1]:.2f} |"
        )
    gains = [exact_match(one, "after", "all") - exact_match(one, "before", "all") for one in results]
    spread = f", standard deviation {statistics.stdev(gains):.1f}" if len(gains) > 1 else ""
    return "\n".join(
        [*rows, "", f"Mean gain {statistics.mean(gains):+.1f} points{spread}, least {min(gains):+.1f}."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="SVG file to write")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    arguments = parser.parse_args()
    results = [json.loads((run / "result.json").read_text("utf-8")) for run in arguments.runs]
    parts = [*reward_panel([rewards(run) for run in arguments.runs]), *gain_panel(results)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>'
    arguments.out.write_text("\n".join([head, background, *parts, "</svg>"]) + "\n", "utf-8")
    print(table(arguments.runs, results))


if __name__ == "__main__":
    main()
