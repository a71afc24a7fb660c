"""What is held fixed while arms and seeds vary: task, organism, start, and how much is learnt from a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
    lr: float = 2.5e-3
    warmup: int = 60
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
    "near": Regime("warm start near the optimum", start=Start(wrong=0.0, steps=800)),
}

_FAR = REGIMES["far"]
#: Name -> the far regime with one property changed.
ABLATIONS: Mapping[str, Regime] = {
    "no-noise": replace(_FAR, about="no retrieval noise", task=replace(_FAR.task, noise=0.0)),
    "ambiguity": replace(
        _FAR,
        about="no retrieval noise, but every fact has two values",
        task=replace(_FAR.task, noise=0.0, ambiguity=1.0),
    ),
    "one-hop": replace(_FAR, about="questions of one hop only", task=replace(_FAR.task, two_hop=0.0)),
    "low-lr": replace(_FAR, about="a quarter of the learning rate", lr=_FAR.lr / 4),
    "big-batch": replace(_FAR, about="twice the responses in every update", questions=2 * _FAR.questions),
    "fresh": replace(
        _FAR,
        about="2 updates a rollout in place of 10; as many updates, of 15 responses",
        questions=6,
        updates=2,
        rollouts=5 * _FAR.rollouts,
        warmup=5 * _FAR.warmup,
    ),
    "slow": replace(
        _FAR,
        about="a quarter of the learning rate, four times the rollouts and the warm-up",
        lr=_FAR.lr / 4,
        rollouts=4 * _FAR.rollouts,
        warmup=4 * _FAR.warmup,
    ),
    "long": replace(_FAR, about="three times the rollouts", rollouts=3 * _FAR.rollouts),
}


#: Some seconds of nothing, to try the installation with.
_SMOKE = Regime(
    "a few seconds on next to nothing, to try the installation",
    task=Task(entities=8, relations=2, words=16),
    body=Body(layers=1, width=16, heads=1),
    start=Start(steps=40, batch=32),
    questions=4,
    updates=2,
    rollouts=12,
    warmup=4,
)


def every_regime() -> dict[str, Regime]:
    """Return all that can be run by name: regimes, ablations, and one to try the installation with."""
    return {**REGIMES, **ABLATIONS, "smoke": _SMOKE}


def regime_named(name: str) -> Regime:
    """Return a regime or an ablation by its name; ``LLDSError`` if there is none."""
    known = every_regime()
    if name not in known:
        raise LLDSError(f"There is no regime {name!r}; choose among {', '.join(known)}.")
    return known[name]
