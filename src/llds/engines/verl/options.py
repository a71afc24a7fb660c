"""The settings of LLDS in verl, and what the run around them says. Plain data: verl is not needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llds.errors import LLDSError
from llds.objective.checks import check_above, check_choice, check_least

GATES = ("action", "response", "token")
#: What can be counted over a whole optimizer batch before the gradient of its first micro-batch, and the
#: authors' count, which is that of each micro-batch.
NORMALIZERS = ("all", "response", "authors")
BASELINES = ("old", "reference")
PREFLIGHTS = ("warn", "stop")
#: Put before every name where it stands in verl's configuration.
PREFIX = "llds_"


@dataclass(frozen=True, kw_only=True)
class LLDSOptions:
    """What to penalise and how much.

    In verl's configuration each stands under ``actor_rollout_ref.actor.policy_loss`` with ``llds_`` in front.

    ``coef``: λ, at least 0; 0 adds nothing to the loss and still measures. ``base``: the policy loss that LLDS
    is added to, any name of verl's registry; "vanilla" if None, with loss_mode=llds. ``gate``, ``preserve``,
    ``advantage_tol``, ``dead_zone`` (nats per token), ``penalty``, ``huber_width`` (nats), ``compat``: as in
    :func:`llds.llds_loss`. ``normalizer``: N counts "all" policy tokens of the optimizer batch, all its
    micro-batches and ranks together, or its responses ("response"); "authors" is the token count of each
    micro-batch, as in the authors' code. ``baseline``: whose likelihood is held, "old" (the policy that
    sampled) or "reference" (needs ``actor.use_kl_loss``). ``answer_weight``: weight of the final answer's
    tokens, a number, or "auto" for min(V / ``answer_searches``, 1) (LLDS-MA, Eq. 5); None leaves answers
    alone. ``lld_epsilon``: ε of Def. 4.1 in nats, for the metrics only. ``wrap_registry``: add LLDS to
    whichever loss verl calls, whatever ``loss_mode`` says by then. ``preflight``: "warn", or "stop" before
    Ray starts when the penalty certainly can't work.

    Raises ``LLDSError`` for a value that cannot be meant.
    """

    coef: float = 0.2
    base: str | None = None
    gate: str = "action"
    normalizer: str = "all"
    baseline: str = "old"
    preserve: str = "nonnegative"
    advantage_tol: float = 1e-3
    dead_zone: float = 0.0
    penalty: str = "relu"
    huber_width: float = 0.1
    answer_weight: float | str | None = None
    answer_searches: float = 2.0
    compat: str | None = None
    lld_epsilon: float = -0.01
    wrap_registry: bool = False
    preflight: str = "warn"

    def __post_init__(self) -> None:
        check_choice(GATES, gate=self.gate)
        _check_normalizer(self.normalizer)
        check_choice(BASELINES, baseline=self.baseline)
        check_choice(("nonnegative", "positive"), preserve=self.preserve)
        check_choice(("relu", "huber"), penalty=self.penalty)
        check_choice((None, "authors"), compat=self.compat)
        check_choice(PREFLIGHTS, preflight=self.preflight)
        for name in ("coef", "advantage_tol", "dead_zone", "huber_width", "answer_searches", "lld_epsilon"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        check_least(0.0, coef=self.coef, advantage_tol=self.advantage_tol, dead_zone=self.dead_zone)
        check_above(0.0, huber_width=self.huber_width, answer_searches=self.answer_searches)
        object.__setattr__(self, "answer_weight", _answer_weight(self.answer_weight))
        if not isinstance(self.wrap_registry, bool):
            raise LLDSError(f"wrap_registry must be true or false, but is {self.wrap_registry!r}.")
        if self.base is not None and (not isinstance(self.base, str) or self.base.startswith("llds")):
            raise LLDSError(f"base must name the loss that LLDS is added to, but is {self.base!r}.")
        if self.compat == "authors" and (self.normalizer == "response" or self.preserve != "nonnegative"):
            raise LLDSError(
                'compat="authors" goes with preserve="nonnegative" and the normalizer "authors" or "all", '
                f"but they are {self.preserve!r} and {self.normalizer!r}."
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> LLDSOptions:
        """Read the ``llds_…`` keys of a policy-loss configuration; other keys are verl's own.

        Raises ``LLDSError``, with the key as it stands there, for a value that can't be meant and for a key
        that does not exist.
        """
        given = {str(key).removeprefix(PREFIX): settings[key] for key in settings if is_ours(key)}
        given.pop("run", None)
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                raise LLDSError(
                    f"LLDS has no setting {PREFIX}{name}; it has {', '.join(PREFIX + one for one in known)}."
                )
        try:
            return cls(**given)
        except LLDSError as error:
            raise LLDSError(f"{PREFIX}{error}") from None

    def loss_options(self) -> dict[str, Any]:
        """Return the keywords that go to :func:`llds.llds_loss` unchanged in every step."""
        names = ("gate", "preserve", "advantage_tol", "dead_zone", "penalty", "huber_width", "compat")
        return {name: getattr(self, name) for name in names}

    @property
    def reads_batch(self) -> bool:
        """Whether the loss needs more of a batch than verl hands to it (:mod:`llds.engines.verl.batch`)."""
        return self.baseline == "reference" or self.answer_weight is not None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the configuration around the loss says of the schedule; None where it does not.

    ``train_batch_size`` and ``mini_batch_size`` in questions, ``epochs`` passes over each rollout,
    ``bypass``: whether the old log-probs are those of the inference engine.
    """

    train_batch_size: int | None = None
    mini_batch_size: int | None = None
    epochs: int | None = None
    bypass: bool | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> RunFacts:
        """Read the mapping ``llds_run`` of a configuration; what is no number there counts as not said."""
        if not given:
            return cls()
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                raise LLDSError(f"llds_run has no entry {name!r}; it has {', '.join(known)}.")
        sizes = {name: _whole(given.get(name)) for name in known[:3]}
        bypass = given.get("bypass")
        return cls(**sizes, bypass=bypass if isinstance(bypass, bool) else None)

    @property
    def updates_per_rollout(self) -> int | None:
        """Optimizer steps on each rollout; None where it isn't said, or is no whole number."""
        if self.train_batch_size is None or self.mini_batch_size is None:
            return None
        steps, rest = divmod(self.train_batch_size * (self.epochs or 1), self.mini_batch_size)
        return None if rest else steps


def is_ours(key: object) -> bool:
    """Say whether a key of verl's policy-loss configuration is one of LLDS."""
    return isinstance(key, str) and key.startswith(PREFIX)


def _check_normalizer(value: str) -> None:
    if value in ("preserved", "gated", "penalised"):
        raise LLDSError(
            f"normalizer={value!r} would have to be counted over a whole optimizer batch before its first "
            "micro-batch, which a loss in verl can't; keep 'all' and convert λ: multiply it by "
            "llds/tokens / llds/sum/preserved_tokens, which are logged."
        )
    check_choice(NORMALIZERS, normalizer=value)


def _number(name: str, value: object) -> float:
    """Return a number, also one such as 1e-3, which YAML takes for text without a point in it."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise LLDSError(f"{name} must be a finite number, but is {value!r}.")
    return number


def _answer_weight(value: float | str | None) -> float | str | None:
    if value is None or value == "auto":
        return value
    try:
        weight = _number("answer_weight", value)
    except LLDSError:
        raise LLDSError(f'answer_weight must be a number, "auto" or null, but is {value!r}.') from None
    check_least(0.0, answer_weight=weight)
    return weight


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
