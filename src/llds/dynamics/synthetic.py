"""Made-up runs with known truth, to test and to show the monitor. Synthetic: drawn from a description.

The collapsing runs follow the words of arXiv 2512.04220: stagnation, then steady decay with a calm gradient
and a reward that still rises, then acceleration with a surge of entropy and gradient and a fall of reward.
The healthy ones do what healthy runs do and simple rules take for trouble. Sizes of effects and of noise are
drawn per seed. None of this says how real runs behave.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: One row per optimizer step, by canonical names.
Row = dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """A synthetic run. ``onset``, ``acceleration``: first steps of phases II and III; None in a healthy
    one."""

    kind: str
    seed: int
    rows: list[Row]
    onset: int | None = None
    acceleration: int | None = None


@dataclass(frozen=True)
class _State:
    """What a run is, before noise, at one step. ``rate``: nats per token and update that correct ones
    lose."""

    rate: float
    level: float
    reward: float
    entropy: float
    grad_norm: float
    searches: float = 2.0


@dataclass(frozen=True)
class _Noise:
    """Standard deviations, and how a run is logged.

    ``responses``: per step. ``per_rollout``: optimizer steps per rollout. ``missing``: share of steps without
    a correct response. ``sparse``: whether the reward is logged once per rollout only.
    """

    responses: int
    per_rollout: int
    rate: float
    level: float
    entropy: float
    grad: float
    missing: float = 0.01
    sparse: bool = False


def spiral(seed: int, steps: int = 300, per_rollout: int | None = None) -> Run:
    """Return a run that collapses in three phases: II begins at step 50 to 120, III another 30 to 70 later.

    ``per_rollout``: optimizer steps per rollout; with 1 there is no displacement to see. Drawn if None.
    """
    rng = random.Random(f"spiral/{seed}")
    onset = rng.randint(50, 120)
    acceleration = onset + rng.randint(30, 70)
    decay, doubling = rng.uniform(1.5e-3, 4e-3), rng.uniform(6, 12)
    level, climb = rng.uniform(-0.45, -0.15), rng.uniform(0, 3e-4)
    followed, spread = rng.uniform(0.4, 1.0), rng.uniform(0, 0.5)
    start, gain = rng.uniform(0.15, 0.3), rng.uniform(0.1, 0.25)
    entropy, grad = rng.uniform(0.25, 0.6), math.exp(rng.uniform(-1.5, 0.5))
    states = []
    for step in range(steps):
        into_second, into_third = step - onset, step - acceleration
        rate = -climb
        if into_second >= 0:
            rate = decay * (1 + 0.5 * min(1.0, into_second / (acceleration - onset)))
        if into_third >= 0:
            rate = min(0.08, rate * 2 ** (into_third / doubling))
        level = max(-3.0, level - followed * rate)
        entropy = min(3.0, max(0.1, entropy + (2 * rate if into_third >= 0 else spread * rate)))
        reward = start + gain * (1 - math.exp(-step / 60))
        fallen = _logistic((into_third - 18) / 5)
        surge = math.exp(min(3.5, max(0, into_third) / 8))
        states.append(
            _State(rate, level, reward * (1 - fallen), entropy, grad * surge, 2.0 * (1 - 0.7 * fallen))
        )
    noise = _Noise(
        responses=rng.choice((64, 128, 256, 512)),
        per_rollout=per_rollout or rng.choice((2, 4, 5, 10)),
        rate=rng.uniform(1e-3, 3e-3),
        level=rng.uniform(0.005, 0.02),
        entropy=rng.uniform(0.005, 0.03),
        grad=rng.uniform(0.1, 0.3),
        sparse=rng.random() < 0.5,
    )
    return Run("spiral", seed, _observe(states, noise, rng), onset, acceleration)


def sharpening(seed: int, steps: int = 300) -> Run:
    """Return a healthy run whose policy becomes sure of itself: likelihood and reward rise, entropy falls."""
    rng = random.Random(f"sharpening/{seed}")
    level, goal, pace = rng.uniform(-0.5, -0.2), rng.uniform(-0.1, -0.02), rng.uniform(40, 150)
    start, gain, entropy = rng.uniform(0.1, 0.3), rng.uniform(0.3, 0.6), rng.uniform(0.4, 0.9)
    states = []
    for step in range(steps):
        done = 1 - math.exp(-step / pace)
        rate = (level - goal) / pace * (1 - done)
        states.append(
            _State(rate, level + (goal - level) * done, start + gain * done, entropy * (1 - 0.8 * done), 0.5)
        )
    return Run("sharpening", seed, _observe(states, _usual_noise(rng), rng))


def reexploration(seed: int, steps: int = 300) -> Run:
    """Return a healthy run that tries new ways: entropy humps, likelihood dips, yet correct responses
    gain."""
    rng = random.Random(f"reexploration/{seed}")
    level, depth = rng.uniform(-0.35, -0.15), rng.uniform(0.1, 0.35)
    middle, width = rng.uniform(100, 180), rng.uniform(25, 50)
    start, gain, entropy = rng.uniform(0.1, 0.3), rng.uniform(0.2, 0.5), rng.uniform(0.2, 0.5)
    rate = -rng.uniform(0, 1e-3)
    states = []
    for step in range(steps):
        hump = math.exp(-0.5 * ((step - middle) / width) ** 2)
        reward = start + gain * (1 - math.exp(-step / 100))
        states.append(
            _State(rate, level - depth * hump, reward, entropy * (1 + 1.5 * hump), 0.5 * (1 + hump))
        )
    return Run("reexploration", seed, _observe(states, _usual_noise(rng), rng))


def small_batch(seed: int, steps: int = 300) -> Run:
    """Return a healthy run on 8 to 32 responses a step: hardly anything to see but noise."""
    rng = random.Random(f"small batch/{seed}")
    level, rate = rng.uniform(-0.5, -0.2), -rng.uniform(0, 1e-3)
    start, gain, entropy = rng.uniform(0.2, 0.4), rng.uniform(0, 0.3), rng.uniform(0.3, 0.8)
    states = [
        _State(rate, level, start + gain * step / steps, entropy * (1 - 0.2 * step / steps), 1.0)
        for step in range(steps)
    ]
    noise = _Noise(
        responses=rng.choice((8, 16, 32)),
        per_rollout=rng.choice((1, 2, 4)),
        rate=rng.uniform(4e-3, 1.2e-2),
        level=rng.uniform(0.04, 0.12),
        entropy=rng.uniform(0.04, 0.1),
        grad=rng.uniform(0.4, 0.7),
        missing=0.15,
        sparse=rng.random() < 0.5,
    )
    return Run("small batch", seed, _observe(states, noise, rng))


def outage(seed: int, steps: int = 300) -> Run:
    """Return a healthy run whose search tool is down for 10 to 25 steps: no reward, nothing else."""
    rng = random.Random(f"outage/{seed}")
    first, length = rng.randint(60, 200), rng.randint(10, 25)
    start, gain, level = rng.uniform(0.15, 0.3), rng.uniform(0.1, 0.3), rng.uniform(-0.4, -0.15)
    states = []
    for step in range(steps):
        reward = start + gain * (1 - math.exp(-step / 80))
        down = first <= step < first + length
        states.append(_State(-2e-4, level, 0.0 if down else reward, 0.4, 0.4, 1.0 if down else 2.0))
    return Run("outage", seed, _observe(states, _usual_noise(rng), rng))


def harder_questions(seed: int, steps: int = 300) -> Run:
    """Return a healthy run whose questions become harder half-way: reward falls, entropy rises a little."""
    rng = random.Random(f"harder questions/{seed}")
    first, drop, level = rng.randint(80, 180), rng.uniform(0.1, 0.25), rng.uniform(-0.4, -0.15)
    states = []
    for step in range(steps):
        reward = 0.2 + 0.3 * (1 - math.exp(-step / 80)) - (drop if step >= first else 0.0)
        states.append(_State(-2e-4, level, reward, 0.46 if step >= first else 0.4, 0.4))
    return Run("harder questions", seed, _observe(states, _usual_noise(rng), rng))


def lazy(seed: int, steps: int = 300) -> Run:
    """Return a run with a little displacement all along that new rollouts make good: no decay, reward
    rises."""
    rng = random.Random(f"lazy/{seed}")
    rate, level = rng.uniform(3e-4, 1e-3), rng.uniform(-0.4, -0.15)
    start, gain, entropy = rng.uniform(0.15, 0.3), rng.uniform(0.1, 0.4), rng.uniform(0.3, 0.6)
    states = [
        _State(rate, level, start + gain * (1 - math.exp(-step / 80)), entropy, 0.4) for step in range(steps)
    ]
    return Run("lazy", seed, _observe(states, _usual_noise(rng), rng))


def lazy_exploration(seed: int, steps: int = 300) -> Run:
    """Return a run that explores while it also loses a little all along; it doesn't collapse either."""
    calm, rate = reexploration(seed, steps), random.Random(f"lazy exploration/{seed}").uniform(1e-3, 2e-3)
    rows: list[Row] = []
    for row in calm.rows:
        lost, updates = row["displacement_correct"], row["updates_since_rollout"]
        rows.append({**row, "displacement_correct": None if lost is None else lost + rate * (updates or 0)})
    return Run("lazy exploration", seed, rows)


#: The healthy runs whose false alarms are counted.
HEALTHY: Mapping[str, Callable[[int], Run]] = {
    "sharpening": sharpening,
    "reexploration": reexploration,
    "small batch": small_batch,
}
#: Further ones that look like trouble in one family of signals; the last in two.
HARD: Mapping[str, Callable[[int], Run]] = {
    "outage": outage,
    "harder questions": harder_questions,
    "lazy": lazy,
    "lazy exploration": lazy_exploration,
}


def healthy(seed: int) -> Run:
    """Return one of the healthy runs, each kind in turn."""
    kinds = list(HEALTHY.values())
    return kinds[seed % len(kinds)](seed)


def _usual_noise(rng: random.Random) -> _Noise:
    return _Noise(
        responses=rng.choice((64, 128, 256, 512)),
        per_rollout=rng.choice((1, 2, 4, 10)),
        rate=rng.uniform(1e-3, 3e-3),
        level=rng.uniform(0.005, 0.02),
        entropy=rng.uniform(0.005, 0.03),
        grad=rng.uniform(0.1, 0.4),
        sparse=rng.random() < 0.5,
    )


def _observe(states: list[_State], noise: _Noise, rng: random.Random) -> list[Row]:
    """Measure a run with heavy-tailed noise: correlated in the level, one gradient spike in a hundred
    steps."""
    rows: list[Row] = []
    wander, moved = 0.0, 0.0
    push = rng.uniform(0, 1e-3)
    for step, state in enumerate(states):
        updates = step % noise.per_rollout
        # Each update moves the log-probs of this rollout's responses once more, and the further they have
        # moved, the more it matters which of the responses are in this step.
        moved = 0.0 if updates == 0 else moved + state.rate + 0.4 * noise.rate * _heavy(rng)
        seen = moved + 0.9 * updates * noise.rate * _heavy(rng)
        pushed = moved + updates * (push + 0.9 * noise.rate * _heavy(rng))
        wander = 0.3 * wander + noise.level * _heavy(rng)
        spike = 5.0 if rng.random() < 0.01 else 1.0
        spread = math.sqrt(max(0.0, state.reward * (1 - state.reward)) / noise.responses)
        reward = min(1.0, max(0.0, rng.gauss(state.reward, spread)))
        none_right = rng.random() < max(noise.missing, (1 - state.reward) ** (noise.responses / 8))
        row: Row = {
            "logprob_correct": None if none_right else min(-1e-3, state.level + wander),
            "displacement_correct": None if none_right else seen,
            "displacement_wrong": pushed,
            "updates_since_rollout": float(updates),
            "entropy": max(0.0, state.entropy + noise.entropy * _heavy(rng)),
            "grad_norm": state.grad_norm * spike * math.exp(noise.grad * _heavy(rng)),
        }
        if updates == 0 or not noise.sparse:
            row["reward"] = reward
            row["searches"] = max(0.0, rng.gauss(state.searches, 0.8 / math.sqrt(noise.responses)))
        rows.append(row)
    return rows


def _heavy(rng: random.Random) -> float:
    """Draw from Student's t with four degrees of freedom, scaled to a standard deviation of 1."""
    chi = sum(rng.gauss(0, 1) ** 2 for _ in range(4))
    return rng.gauss(0, 1) / math.sqrt(chi / 4) / math.sqrt(2)


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-max(-50.0, min(50.0, x))))
