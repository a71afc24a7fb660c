"""The arms: plain GRPO, and every remedy as the one or two settings in which it differs from it.

No arm was tuned: each has the value of its paper or the next round number, fixed before the first sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from llds.errors import LLDSError
from llds.objective.checks import check_above, check_choice, check_least


@dataclass(frozen=True)
class Arm:
    """What is minimised. The defaults are the paper's GRPO without LLDS.

    ``policy``: "grpo" (a ratio per token) or "gspo" (a ratio per response, with the clip range of its
    paper). ``clip_high``: upper clip range, the lower one if None. ``kl``: coefficient of the k3 estimate
    towards the start. ``entropy``: coefficient of the entropy bonus. ``lr_factor``: on the regime's learning
    rate.

    Ablations of the mechanism: ``spare_prefix`` keeps from the policy loss what a wrong response begins with
    just like a right one of its group, ``spare_wrong`` wrong responses altogether. ``kl_on``: "all"
    responses, those of A ≥ 0 ("preserved"), or those of A < 0 ("wrong"); a token weighs the same in each. The
    series of the KL is that of the term.

    The rest as in :func:`llds.llds_loss`: ``coef`` is λ. ``baseline``: "old"; "anchor", the policy up to
    ``anchor_every`` updates ago; or "ref", the start. ``answer_searches``: V_B of Eq. 5, None without MA.
    ``control``: move λ against the measured displacement, from ``coef`` on.
    """

    about: str = "plain GRPO"
    policy: str = "grpo"
    clip_high: float | None = None
    kl: float = 1e-3
    entropy: float = 0.0
    lr_factor: float = 1.0
    kl_on: str = "all"
    spare_prefix: bool = False
    spare_wrong: bool = False
    coef: float = 0.0
    gate: str = "action"
    normalizer: str = "all"
    preserve: str = "nonnegative"
    dead_zone: float = 0.0
    penalty: str = "relu"
    huber_width: float = 0.1
    baseline: str = "old"
    anchor_every: int = 10
    answer_searches: float | None = None
    control: bool = False

    def __post_init__(self) -> None:
        check_choice(("grpo", "gspo"), policy=self.policy)
        check_choice(("old", "anchor", "ref"), baseline=self.baseline)
        check_choice(("all", "preserved", "wrong"), kl_on=self.kl_on)
        check_least(0.0, kl=self.kl, entropy=self.entropy, coef=self.coef)
        check_above(0.0, lr_factor=self.lr_factor, answer_searches=self.answer_searches)

    def settings(self) -> dict[str, object]:
        """Return what differs from plain GRPO, by name."""
        plain = Arm()
        named = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "about"}
        return {name: value for name, value in named.items() if value != getattr(plain, name)}


_GRPO = Arm()
_LLDS = Arm("LLDS, action gate, λ = 0.2 (normaliser all): the paper's default", coef=0.2)
_KL = {"kl10": ("KL × 10", 0.01), "kl100": ("KL × 100", 0.1), "kl1000": ("KL × 1000", 1.0)}

#: Name -> arm, in the order in which they are shown.
ARMS: Mapping[str, Arm] = {
    "grpo": _GRPO,
    **{name: replace(_GRPO, about=about, kl=kl) for name, (about, kl) in _KL.items()},
    "llds": _LLDS,
    **{f"llds+{name}": replace(_LLDS, about=f"LLDS and {about}", kl=kl) for name, (about, kl) in _KL.items()},
    "llds-token": replace(_LLDS, about="LLDS, token gate (Eq. 9)", gate="token"),
    "llds-response": replace(_LLDS, about="LLDS, response gate (Eq. 10)", gate="response"),
    "llds-ma": replace(_LLDS, about="LLDS-MA, V_B = 2 (Eq. 5)", answer_searches=2.0),
    "llds-positive": replace(_LLDS, about="LLDS, preserving A > 0 alone", preserve="positive"),
    "llds-0.05": replace(_LLDS, about="LLDS, λ = 0.05", coef=0.05),
    "llds-0.1": replace(_LLDS, about="LLDS, λ = 0.1", coef=0.1),
    "llds-0.5": replace(_LLDS, about="LLDS, λ = 0.5", coef=0.5),
    "llds-1": replace(_LLDS, about="LLDS, λ = 1", coef=1.0),
    "llds-preserved-0.05": replace(
        _LLDS, about="LLDS, normaliser of Eq. 4, λ = 0.05", normalizer="preserved", coef=0.05
    ),
    "llds-preserved-0.2": replace(_LLDS, about="LLDS, normaliser of Eq. 4, λ = 0.2", normalizer="preserved"),
    "llds-preserved-0.5": replace(
        _LLDS, about="LLDS, normaliser of Eq. 4, λ = 0.5", normalizer="preserved", coef=0.5
    ),
    "llds-dead-zone": replace(_LLDS, about="LLDS, dead zone of 0.01 nats/token", dead_zone=0.01),
    "llds-anchor": replace(
        _LLDS, about="LLDS towards the policy 1 to 50 updates ago", baseline="anchor", anchor_every=50
    ),
    "llds-huber": replace(_LLDS, about="LLDS, Huber penalty of width 0.1 nats", penalty="huber"),
    "llds-control": replace(_LLDS, about="LLDS, λ from 0.2 on moved by displacement", control=True),
    "entropy-bonus": replace(_GRPO, about="entropy bonus 0.001", entropy=1e-3),
    "clip-higher": replace(_GRPO, about="clip-higher 0.28 (DAPO)", clip_high=0.28),
    "half-lr": replace(_GRPO, about="half the learning rate", lr_factor=0.5),
    "gspo": replace(_GRPO, about="GSPO", policy="gspo"),
    "gspo+llds": replace(_LLDS, about="GSPO and LLDS", policy="gspo"),
    "spare-prefix": replace(_GRPO, about="shared prefixes of wrong responses spared", spare_prefix=True),
    "spare-wrong": replace(
        _GRPO, about="wrong responses spared: learns from right ones alone", spare_wrong=True
    ),
    "kl100-preserved": replace(
        _GRPO, about="KL × 100 on responses of A ≥ 0 alone", kl=0.1, kl_on="preserved"
    ),
    "kl100-wrong": replace(_GRPO, about="KL × 100 on responses of A < 0 alone", kl=0.1, kl_on="wrong"),
    "llds-ref": replace(_LLDS, about="LLDS towards the start, λ = 0.2", baseline="ref"),
}
#: Arms that were added after the first sweep, to find out why the others did what they did.
AFTERWARDS = ("spare-wrong", "kl100-preserved", "kl100-wrong", "llds-ref")


def arm_named(name: str) -> Arm:
    """Return an arm by its name; ``LLDSError`` if there is none."""
    if name not in ARMS:
        raise LLDSError(f"There is no arm {name!r}; choose among {', '.join(ARMS)}.")
    return ARMS[name]
