"""The settings of LLDS in TRL: keywords of ``attach_llds``, and fields ``llds_…`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from llds.errors import LLDSError
from llds.objective.checks import check_above, check_choice, check_least

GATES = ("action", "response", "token")
#: What is known before the forward pass, and so can be counted over a whole optimizer batch ahead of its
#: gradient.
NORMALIZERS = ("all", "preserved", "response")
BASELINES = ("old", "reference", "anchor")
ON_ALARM = ("ignore", "warn", "stop")


@dataclass(frozen=True, kw_only=True)
class LLDSOptions:
    """What to penalise and how much; :class:`LLDSGRPOConfig` explains each setting with its unit.

    Raises ``LLDSError`` for a value that cannot be meant.
    """

    coef: float = 0.2
    warmup_steps: int = 0
    gate: str = "action"
    normalizer: str = "all"
    baseline: str = "old"
    anchor_every: int = 8
    preserve: str = "nonnegative"
    advantage_tol: float = 1e-3
    dead_zone: float = 0.0
    penalty: str = "relu"
    huber_width: float = 0.1
    answer_weight: float | str | None = None
    answer_searches: float = 2.0
    lld_epsilon: float = -0.01
    on_alarm: str = "warn"

    def __post_init__(self) -> None:
        check_choice(GATES, gate=self.gate)
        check_choice(NORMALIZERS, normalizer=self.normalizer)
        check_choice(BASELINES, baseline=self.baseline)
        check_choice(("nonnegative", "positive"), preserve=self.preserve)
        check_choice(("relu", "huber"), penalty=self.penalty)
        check_choice(ON_ALARM, on_alarm=self.on_alarm)
        self._check_numbers()
        object.__setattr__(self, "answer_weight", _answer_weight(self.answer_weight))

    def _check_numbers(self) -> None:
        for name in ("coef", "advantage_tol", "dead_zone", "huber_width", "answer_searches", "lld_epsilon"):
            _check_number(name, getattr(self, name))
        for name in ("warmup_steps", "anchor_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise LLDSError(f"{name} must be a whole number of optimizer steps, but is {value!r}.")
        check_least(0.0, coef=self.coef, advantage_tol=self.advantage_tol, dead_zone=self.dead_zone)
        check_least(0, warmup_steps=self.warmup_steps)
        check_least(1, anchor_every=self.anchor_every)
        check_above(0.0, huber_width=self.huber_width, answer_searches=self.answer_searches)

    def coef_at(self, step: int) -> float:
        """Return λ in the optimizer step after ``step`` others: it rises linearly over ``warmup_steps``."""
        return self.coef * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else self.coef

    @classmethod
    def of(cls, **options: Any) -> LLDSOptions:
        """Make options from keywords, with a sentence for a keyword that does not exist."""
        known = [item.name for item in fields(cls)]
        for name in options:
            if name not in known:
                raise LLDSError(f"LLDS has no setting {name!r}; it has {', '.join(known)}.")
        return cls(**options)

    def loss_options(self) -> Mapping[str, Any]:
        """Return the keywords that go to :func:`llds.llds_loss` unchanged in every step."""
        names = ("gate", "preserve", "advantage_tol", "dead_zone", "penalty", "huber_width")
        return {name: getattr(self, name) for name in names}


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value == float("inf"):
        raise LLDSError(f"{name} must be a finite number, but is {value!r}.")


def _answer_weight(value: float | str | None) -> float | str | None:
    """Read the answer weight, which a command line passes as text."""
    if value is None or value == "auto":
        return value
    try:
        weight = float(value)
    except (TypeError, ValueError):
        raise LLDSError(f'answer_weight must be a number, "auto" or None, but is {value!r}.') from None
    check_least(0.0, answer_weight=weight)
    _check_number("answer_weight", weight)
    return weight


def _field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class LLDSGRPOConfig(GRPOConfig):
    """``GRPOConfig`` and the settings of LLDS, each named ``llds_…`` and explained in its ``help``.

    Raises ``LLDSError``, a ``ValueError``, for a value that cannot be meant.
    """

    llds_coef: float = _field(
        0.2,
        "Weight λ of the LLDS penalty, at least 0; 0 is plain GRPO with the LLDS metrics. Its meaning "
        "depends on `llds_normalizer`. The paper uses 0.2 (3B); small models may need less, so sweep it.",
    )
    llds_warmup_steps: int = _field(
        0, "Optimizer steps over which λ rises linearly from 0 to `llds_coef`; 0 for none."
    )
    llds_gate: str = _field(
        "action",
        "What must have become less likely as a whole before its tokens are penalised: the 'action' (a run "
        "of tokens that the policy wrote; Eq. 4), the 'response' (Eq. 10) or the 'token' alone (Eq. 9).",
    )
    llds_normalizer: str = _field(
        "all",
        "What the summed penalty is divided by, counted over the whole optimizer batch (all micro-batches "
        "and processes): 'all' tokens that the policy wrote (the authors' code), 'preserved' tokens (Eq. "
        "4), or 'response', the number of responses.",
    )
    llds_baseline: str = _field(
        "old",
        "Policy whose likelihood is held: 'old', the one that sampled (needs more than one optimizer step "
        "per rollout); 'reference', the reference policy (needs `beta` above 0); 'anchor', a copy of the "
        "trained weights some optimizer steps old (costs the copy and one more forward pass).",
    )
    llds_anchor_every: int = _field(
        8, "Optimizer steps between refreshes of the anchor, at least 1; it is 1 to this many steps old."
    )
    llds_preserve: str = _field(
        "nonnegative", "Responses to preserve: 'nonnegative' (advantage >= 0, the paper) or 'positive' (> 0)."
    )
    llds_advantage_tol: float = _field(
        1e-3, "An advantage of at most this size counts as 0, for rounding gives equal rewards up to 7e-4."
    )
    llds_dead_zone: float = _field(
        0.0,
        "Drop per token, in nats, to overlook as numerical noise; the metric llds/noise_floor measures it.",
    )
    llds_penalty: str = _field(
        "relu",
        "Shape of the penalty: 'relu' (the paper; full gradient however small the drop) or 'huber' (the "
        "gradient fades with the drop).",
    )
    llds_huber_width: float = _field(
        0.1, "Drop in nats at which the huber penalty reaches its full gradient, above 0."
    )
    llds_answer_weight: float | str | None = _field(
        None,
        "Weight of final-answer tokens: a number, 1 for no difference, or 'auto' for min(V / "
        "`llds_answer_searches`, 1), V being the mean number of valid searches per trajectory of the "
        "rollout (Eq. 5, LLDS-MA). Needs a `rollout_func` that returns `answer_mask`, and for 'auto' "
        "`valid_searches`. None to leave answers alone.",
    )
    llds_answer_searches: float = _field(
        2.0,
        "Searches per trajectory from which answers count in full with `llds_answer_weight='auto'`, above 0.",
    )

    llds_lld_epsilon: float = _field(
        -0.01,
        "An action or a response counts as displaced in the llds/lld_... metrics when its log-prob changed by "
        "this many nats or less (epsilon of Def. 4.1). Not part of the penalty.",
    )
    llds_on_alarm: str = _field(
        "warn",
        "What to do when the monitor sees correct responses lose likelihood and a second sign of trouble: "
        "'warn' (log it, call the hooks, write llds_events.jsonl), 'stop' training as well, or 'ignore' (no "
        "monitor). Set logging_steps=1 for the earliest alarm.",
    )

    def __post_init__(self) -> None:
        """Check the settings of LLDS after TRL has checked its own."""
        super().__post_init__()
        self.llds_options()

    def llds_options(self) -> LLDSOptions:
        """Return the settings of LLDS, checked."""
        try:
            return LLDSOptions(
                **{item.name: getattr(self, f"llds_{item.name}") for item in fields(LLDSOptions)}
            )
        except LLDSError as error:
            raise LLDSError(f"llds_{error}") from None
