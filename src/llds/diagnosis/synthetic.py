"""Made-up logs with known truth, to test the diagnosis and to measure how often it is wrong. Synthetic.

Sizes of effects, of noise and of batches, lengths, and which columns are there are drawn per seed. None of this
says how real logs behave.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llds.diagnosis.table import Column, Table

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Made:
    """A log and its truth. ``onset``: the step at which it begins; None in a healthy one."""

    kind: str
    seed: int
    table: Table
    onset: int | None = None


@dataclass
class _Run:
    """Series before noise, [N] each, and what noise they get."""

    rng: random.Random
    steps: int
    noise: float
    level: dict[str, Floats] = field(default_factory=dict)

    def draw(self) -> np.random.Generator:
        return np.random.default_rng(self.rng.randrange(1 << 30))


def _healthy_run(rng: random.Random, steps: int | None = None) -> _Run:
    """A search agent that learns: reward rises and levels off, entropy falls a little, turns wander slowly."""
    count = steps or rng.choice((40, 60, 100, 150, 250, 400))
    run = _Run(rng, count, rng.choice((0.01, 0.02, 0.04)))
    t = np.arange(count) / rng.uniform(30, 120)
    start, gain = rng.uniform(-0.6, 0.3), rng.uniform(0.1, 0.4)
    run.level = {
        "reward": start + gain * (1 - np.exp(-t)),
        "response_tokens": np.full(count, rng.uniform(200, 1500))
        * (1 + rng.uniform(-0.1, 0.3) * (1 - np.exp(-t))),
        "turns": np.full(count, 2 + rng.uniform(2, 6)),
        "entropy": rng.uniform(0.2, 0.8) * (0.6 + 0.4 * np.exp(-t)),
        "grad_norm": np.full(count, math.exp(rng.uniform(-2, 0.5))),
        "kl_ref": 0.02 + rng.uniform(0.01, 0.2) * t / max(1.0, float(t[-1])),
        "kl_old": np.full(count, 1e-4),
        "clip_share": np.full(count, 2e-3),
        "truncated": np.full(count, rng.uniform(0.0, 0.05)),
        "generation_seconds": np.full(count, rng.uniform(20, 200)),
    }
    return run


def _observe(run: _Run, kind: str, seed: int, onset: int | None) -> Made:
    """Add noise as a log shows it, drop some columns, and number the steps."""
    draw, noise = run.draw(), run.noise
    values: dict[str, Floats] = {}
    for name, level in run.level.items():
        scatter = draw.standard_t(5, run.steps)
        if name in {"reward", "truncated", "tool_success"}:
            values[name] = level + 1.5 * noise * scatter
        elif name == "kl_old":
            values[name] = level * scatter
        elif name == "turns":
            values[name] = 2 + (level - 2) * np.exp(np.clip(3 * noise * scatter, -1.5, 1.5))
        else:
            wide = {"grad_norm": 4.0, "generation_seconds": 6.0}.get(name, 2.0)
            values[name] = level * np.exp(np.clip(wide * noise * scatter, -1.5, 1.5))
    if "truncated" in values:
        values["truncated"] = np.clip(values["truncated"], 0, 1)
    missing = draw.random((run.steps,)) < 0.02
    for name in ("reward", "response_tokens", "turns", "generation_seconds"):
        values[name] = np.where(missing, np.nan, values[name])
    every = run.rng.choice((1, 1, 1, 5))
    steps = np.arange(1, run.steps + 1, dtype=np.int64) * every
    columns = {name: _column(name, series) for name, series in values.items()}
    return Made(
        kind, seed, Table(steps, columns, "console", "verl"), None if onset is None else int(steps[onset])
    )


def _column(name: str, values: Floats) -> Column:
    key = {"turns": "num_turns/mean", "reward": "critic/score/mean"}.get(name, name)
    return Column(name, key, values, np.isnan(values) & False)


def _ramp(run: _Run, start: int, length: float) -> Floats:
    """From 0 before ``start`` smoothly to 1 after ``length`` rows."""
    t = np.clip((np.arange(run.steps) - start) / max(1.0, length), 0, 1)
    return t * t * (3 - 2 * t)


def _visible(start: int, length: float) -> int:
    """Return the row at which a ramp has gone a twentieth of its way, which is where it can be said to begin."""
    return start + round(0.135 * length)


def _start(run: _Run, share: tuple[float, float] = (0.25, 0.6)) -> int:
    return max(5, int(run.rng.uniform(*share) * run.steps))


def sharpening(seed: int) -> Made:
    """Healthy: the reward rises, entropy falls to a tenth."""
    rng = random.Random(f"sharpening/{seed}")
    run = _healthy_run(rng)
    run.level["entropy"] = run.level["entropy"] * (1 - 0.9 * _ramp(run, 0, 0.8 * run.steps))
    return _observe(run, "healthy", seed, None)


def exploration(seed: int) -> Made:
    """Healthy: entropy doubles and comes back, responses and turns grow, the reward rises."""
    rng = random.Random(f"exploration/{seed}")
    run = _healthy_run(rng, rng.choice((150, 250, 400)))
    hump = np.exp(-0.5 * ((np.arange(run.steps) - 0.4 * run.steps) / (0.15 * run.steps)) ** 2)
    run.level["entropy"] = run.level["entropy"] * (1 + rng.uniform(0.7, 1.6) * hump)
    growth = 1 + rng.uniform(0.5, 3) * _ramp(run, 0, run.steps)
    run.level["response_tokens"] = run.level["response_tokens"] * growth
    run.level["truncated"] = run.level["truncated"] + 0.15 * _ramp(run, 0, run.steps)
    return _observe(run, "healthy", seed, None)


def tiny_batch(seed: int) -> Made:
    """Healthy: a handful of responses a step, so every series is noisy."""
    rng = random.Random(f"tiny batch/{seed}")
    run = _healthy_run(rng, rng.choice((100, 250, 400)))
    run.noise = rng.uniform(0.12, 0.25)
    return _observe(run, "healthy", seed, None)


def concise(seed: int) -> Made:
    """Healthy: responses become shorter by a third or more while the reward rises."""
    rng = random.Random(f"concise/{seed}")
    run = _healthy_run(rng, rng.choice((150, 250)))
    run.level["response_tokens"] = run.level["response_tokens"] * (
        1 - rng.uniform(0.3, 0.6) * _ramp(run, 0, run.steps)
    )
    return _observe(run, "healthy", seed, None)


def abandonment(seed: int) -> Made:
    """The policy gives up its tools, slowly or at once; then responses shrink and the reward falls."""
    rng = random.Random(f"abandonment/{seed}")
    run = _healthy_run(rng)
    start = _start(run) if rng.random() < 0.7 else rng.randint(2, 4)
    length = rng.uniform(6, 0.35 * run.steps)
    fall = _ramp(run, start, length)
    late = _ramp(run, start + int(0.4 * length), length)
    run.level["turns"] = 2 + (run.level["turns"] - 2) * (1 - fall) + 0.005
    run.level["response_tokens"] = run.level["response_tokens"] * (1 - 0.97 * late)
    run.level["reward"] = run.level["reward"] - rng.uniform(0.25, 0.6) * late
    run.level["grad_norm"] = run.level["grad_norm"] * np.exp(
        rng.uniform(0, 3) * _ramp(run, start + int(length), 10)
    )
    return _observe(run, "tool-abandonment", seed, _visible(start, length))


def outage(seed: int) -> Made:
    """The retriever dies: reward, length and time jump within a step; it may come back."""
    rng = random.Random(f"outage/{seed}")
    run = _healthy_run(rng)
    start = _start(run)
    end = run.steps if rng.random() < 0.5 else min(run.steps, start + rng.randint(8, 30))
    down = ((np.arange(run.steps) >= start) & (np.arange(run.steps) < end)).astype(np.float64)
    run.level["reward"] = run.level["reward"] - rng.uniform(0.25, 0.5) * down
    run.level["response_tokens"] = run.level["response_tokens"] * (1 - rng.uniform(0.3, 0.6) * down)
    run.level["generation_seconds"] = run.level["generation_seconds"] * (1 + rng.uniform(1, 4) * down)
    return _observe(run, "outage", seed, start)


def shrink(seed: int) -> Made:
    """Responses shrink to a fraction and the reward falls; there are no tools."""
    rng = random.Random(f"shrink/{seed}")
    run = _healthy_run(rng)
    start = _start(run)
    length = rng.uniform(8, 0.3 * run.steps)
    fall = _ramp(run, start, length)
    del run.level["turns"]
    run.level["turns"] = np.full(run.steps, 2.0)
    run.level["response_tokens"] = run.level["response_tokens"] * (1 - rng.uniform(0.75, 0.98) * fall)
    run.level["reward"] = run.level["reward"] - rng.uniform(0.25, 0.5) * _ramp(
        run, start + int(0.2 * length), length
    )
    return _observe(run, "length-shrink", seed, _visible(start, length))


def growth(seed: int) -> Made:
    """Responses grow until most are cut off, and the reward falls."""
    rng = random.Random(f"growth/{seed}")
    run = _healthy_run(rng, rng.choice((100, 150, 250)))
    start = _start(run, (0.2, 0.4))
    length = rng.uniform(15, 0.4 * run.steps)
    rise = _ramp(run, start, length)
    run.level["response_tokens"] = run.level["response_tokens"] * (1 + rng.uniform(1.5, 4) * rise)
    run.level["truncated"] = run.level["truncated"] + rng.uniform(0.5, 0.9) * rise
    run.level["reward"] = run.level["reward"] - rng.uniform(0.25, 0.5) * _ramp(
        run, start + int(0.3 * length), length
    )
    return _observe(run, "length-growth", seed, _visible(start, length))


def explosion(seed: int) -> Made:
    """Entropy grows without end and the reward falls; turns and gradient stay."""
    rng = random.Random(f"explosion/{seed}")
    run = _healthy_run(rng)
    start = _start(run)
    length = rng.uniform(8, 0.3 * run.steps)
    run.level["entropy"] = run.level["entropy"] + rng.uniform(1.0, 4.0) * _ramp(run, start, length)
    run.level["reward"] = run.level["reward"] - rng.uniform(0.25, 0.5) * _ramp(
        run, start + int(0.2 * length), length
    )
    return _observe(run, "entropy-explosion", seed, _visible(start, length))


def spiral(seed: int) -> Made:
    """Entropy and gradient surge together and the reward falls, turns hold: phase III without log-probs."""
    rng = random.Random(f"spiral/{seed}")
    run = _healthy_run(rng)
    start = _start(run)
    length = rng.uniform(8, 0.3 * run.steps)
    rise = _ramp(run, start, length)
    run.level["entropy"] = run.level["entropy"] + rng.uniform(1.0, 3.0) * rise
    run.level["grad_norm"] = run.level["grad_norm"] * np.exp(rng.uniform(2, 4) * rise)
    run.level["reward"] = run.level["reward"] - rng.uniform(0.3, 0.6) * _ramp(
        run, start + int(0.3 * length), length
    )
    return _observe(run, "spiral-phase-3", seed, _visible(start, length))


def not_a_number(seed: int) -> Made:
    """The gradient becomes NaN, and stays so."""
    rng = random.Random(f"nan/{seed}")
    made = _observe(run := _healthy_run(rng), "nan", seed, None)
    start = _start(run, (0.1, 0.9))
    columns = dict(made.table.columns)
    for name in ("grad_norm", "entropy"):
        values, printed = columns[name].values.copy(), np.zeros(run.steps, dtype=bool)
        values[start:], printed[start:] = np.nan, True
        columns[name] = Column(name, columns[name].key, values, printed)
    table = Table(made.table.steps, columns, "console", "verl")
    return Made("nan", seed, table, int(table.steps[start]))


def dead(seed: int) -> Made:
    """Everything is at its floor from an early step on."""
    rng = random.Random(f"dead/{seed}")
    run = _healthy_run(rng, rng.choice((60, 100, 250)))
    start = _start(run, (0.2, 0.5))
    made = _observe(run, "dead", seed, None)
    columns = dict(made.table.columns)
    for name, floor in (("grad_norm", 0.0), ("reward", -1.0), ("response_tokens", 1.0)):
        values = columns[name].values.copy()
        values[start:] = floor
        columns[name] = Column(name, columns[name].key, values, np.zeros(run.steps, dtype=bool))
    table = Table(made.table.steps, columns, "console", "verl")
    return Made("dead", seed, table, int(table.steps[start]))


HEALTHY: Mapping[str, Callable[[int], Made]] = {
    "sharpening": sharpening,
    "exploration": exploration,
    "tiny batch": tiny_batch,
    "concise": concise,
}
SICK: Mapping[str, Callable[[int], Made]] = {
    "tool-abandonment": abandonment,
    "outage": outage,
    "length-shrink": shrink,
    "length-growth": growth,
    "entropy-explosion": explosion,
    "spiral-phase-3": spiral,
    "nan": not_a_number,
    "dead": dead,
}
