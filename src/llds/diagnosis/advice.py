"""What to change, by the name that the setting has in the engine that wrote the log."""

from __future__ import annotations

from collections.abc import Mapping

_LLDS: Mapping[str, str] = {
    "verl": "add LLDS: hydra.searchpath=[pkg://llds.engines.verl.conf] +llds@_global_=default (see docs/verl.md)",
    "trl": "add LLDS: attach_llds(trainer, coef=0.2) from llds.engines.trl, before trainer.train()",
    "ms-swift": "add LLDS to the trainer: attach_llds(trainer, coef=0.2) from llds.engines.trl",
    "llds": "raise llds.coef (0.2 is the paper's), or set dynamics.on_alarm=rollback",
    "unknown": "add LLDS, with a weight of 0.2 over all action tokens (llds.llds_loss)",
}
_KL: Mapping[str, str] = {
    "verl": "raise actor_rollout_ref.actor.kl_loss_coef (with use_kl_loss=True)",
    "trl": "raise beta",
    "ms-swift": "raise beta",
    "llds": "raise grpo.beta",
    "unknown": "raise the weight of the KL to the reference",
}
_RATE: Mapping[str, str] = {
    "verl": "lower actor_rollout_ref.actor.optim.lr",
    "trl": "lower learning_rate",
    "ms-swift": "lower learning_rate",
    "llds": "lower grpo.learning_rate",
    "unknown": "lower the learning rate",
}
_STEPS: Mapping[str, str] = {
    "verl": "set actor.ppo_mini_batch_size to half of data.train_batch_size or less, or actor.ppo_epochs=2",
    "trl": "set num_iterations=2, or steps_per_generation to twice gradient_accumulation_steps",
    "ms-swift": "set num_iterations=2, or steps_per_generation to twice gradient_accumulation_steps",
    "llds": "set grpo.steps_per_rollout=2 or grpo.passes=2",
    "unknown": "take two or more optimizer steps per rollout",
}
_LENGTH: Mapping[str, str] = {
    "verl": "raise data.max_response_length, or punish overlong responses (reward_model.overlong_buffer)",
    "trl": "raise max_completion_length, or set mask_truncated_completions=True",
    "ms-swift": "raise max_completion_length, or set overlong_filter",
    "llds": "raise episode.max_response",
    "unknown": "raise the limit on response length, or leave truncated responses out of the loss",
}


def advice_for(kind: str, engine: str) -> tuple[str, ...]:
    """Return what to change for a class of :data:`~llds.diagnosis.findings.CLASSES` in an engine."""
    llds, kl, rate, steps, length = (
        table.get(engine, table["unknown"]) for table in (_LLDS, _KL, _RATE, _STEPS, _LENGTH)
    )
    back = "go back to a checkpoint before the onset"
    return {
        "spiral-phase-1": (f"watch it; {llds}",),
        "spiral-phase-2": (f"{back}, and {llds}", f"or {kl}"),
        "spiral-phase-3": (f"{back}, and {llds}", f"or {kl}", rate),
        "tool-abandonment": (
            f"{back}, and {llds}",
            "see that an answer without a tool call is not rewarded as well as one with it",
            f"or {kl}",
        ),
        "outage": (
            "retry failed tool calls, and leave their episodes out of the loss instead of rewarding them with 0",
            "go on from the last checkpoint before the outage; the policy needs no other setting",
        ),
        "length-shrink": (f"{back}, and look whether the reward is paid for short answers", llds, kl),
        "length-growth": (length,),
        "entropy-fall": (
            f"if the reward does not rise any more: {kl}, or raise the temperature or the upper clip range",
        ),
        "entropy-explosion": (f"{back}", f"{llds}; or {kl}", rate),
        "nan": (
            f"go back to the last checkpoint with finite numbers, and {rate}",
            "train in bfloat16 or float32 rather than float16, and clip the gradient",
        ),
        "dead": (f"{back}: what is trained from here on learns nothing", f"{llds}; or {kl}; {rate}"),
        "no-op": (f"to give ratio, clip and LLDS something to do, {steps}",),
        "not-enough-data": (
            "come back with 20 rows or more; llds watch tells as soon as there is a verdict",
        ),
        "healthy": (),
    }[kind]
