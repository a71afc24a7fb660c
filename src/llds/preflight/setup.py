"""What a configuration says about LLDS, in words that every engine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class Setup:
    """A training set-up as far as LLDS is concerned. None means: the configuration does not say.

    ``engine``: who trains. ``is_attached``: whether anything would call the penalty. ``times``: how often it
    would be called. ``coef``: λ. ``gate``, ``normalizer``, ``baseline``, ``preserve``, ``advantage_tol``,
    ``answer_weight``: as in :func:`llds.llds_loss`. ``steps_per_rollout``: optimizer steps on each rollout, all
    passes together. ``group_size``: responses per question. ``kl_in_loss``, ``kl_in_reward``: weights of a KL
    to the reference. ``advantages``: the name of their estimator. ``old_from_inference``: whether the old
    log-probs are those of the inference engine, ``has_inference_logprobs``: whether it is told to return any.
    ``masks_feedback``: whether what tools wrote is left out of the loss; ``is_multi_turn``: whether there are
    tools at all. ``has_answer_mask``: whether rollouts tell the answer span. ``logging_steps``: optimizer
    steps per log entry. ``names``: field -> the setting's name in that engine, for advice.
    ``live_advice``: how to make old and new differ in that engine.
    """

    engine: str
    is_attached: bool | None = None
    times: int = 1
    coef: float | None = None
    gate: str | None = None
    normalizer: str | None = None
    baseline: str | None = None
    preserve: str | None = None
    advantage_tol: float | None = None
    answer_weight: float | str | None = None
    steps_per_rollout: Fraction | None = None
    group_size: int | None = None
    kl_in_loss: float | None = None
    kl_in_reward: float | None = None
    advantages: str | None = None
    old_from_inference: bool | None = None
    has_inference_logprobs: bool | None = None
    masks_feedback: bool | None = None
    is_multi_turn: bool | None = None
    has_answer_mask: bool | None = None
    logging_steps: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    live_advice: str = ""

    def name(self, setting: str) -> str:
        """Return what the engine calls a setting."""
        return self.names.get(setting, setting)
