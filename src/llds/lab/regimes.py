"""What is held fixed while arms and seeds vary: task, organism, start, and how much is learnt from a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llds.errors import LLDSError
from llds.lab.organism import Body
from llds.lab.rollouts import Limits
from llds.lab.warm import Start
from llds.lab.world import Task


@dataclass(frozen=True)
class Regime:
    """One regime.

    ``questions`` × ``group_size`` responses a rollout, learnt from in ``updates`` optimizer steps of equal
    size; ``rollouts`` in a run. ``lr``: of AdamW; it rises over the first ``warmup`` rollouts.
    ``weight_decay``, ``max_grad_norm``: as usual.
    """

    about: str
    task: Task = field(default_factory=Task)
    body: Body = field(default_factory=Body)
    start: Start = field(default_factory=Start)
    limits: Limits = field(default_factory=Limits)
    questions: int = 32
    group_size: int = 5
    updates: int = 10
    rollouts: int = 100
    lr: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.questions * self.group_size % self.updates:
            raise LLDSError(
                f"{self.questions} × {self.group_size} responses cannot be split into {self.updates} updates "
                "of equal size."
            )


#: Name -> regime.
REGIMES: Mapping[str, Regime] = {
    "far": Regime("warm start far from the optimum"),
    "near": Regime("warm start near the optimum", start=Start(wrong=0.1)),
}


def regime_named(name: str) -> Regime:
    """Return a regime by its name; ``LLDSError`` if there is none."""
    if name not in REGIMES:
        raise LLDSError(f"There is no regime {name!r}; choose among {', '.join(REGIMES)}.")
    return REGIMES[name]
