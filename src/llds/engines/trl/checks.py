"""What can be said before the first step: where the penalty cannot act, and where noise would drive it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from llds.engines.trl.config import LLDSOptions
from llds.errors import LLDSError

#: Logged in every optimizer step: 1 if the penalty was zero by construction there, 0 if it could have acted.
STRUCTURAL_METRIC = "llds/structural_zero"


@dataclass(frozen=True)
class LLDSStatus:
    """Whether LLDS can act under a configuration.

    ``kind``: "off" (λ = 0), "structural_zero" (it cannot act in any step), "partial" (not in some) or "live".
    ``text``: one or two sentences for a person, with the settings to change where there is something to
    change. ``metric``: the logged name that tells the same of a single optimizer step.
    """

    kind: Literal["off", "structural_zero", "partial", "live"]
    text: str
    metric: str = STRUCTURAL_METRIC


def structural_status(args: Any, options: LLDSOptions) -> LLDSStatus:
    """Read from a checked ``GRPOConfig`` in which optimizer steps the penalty is zero by construction."""
    if options.coef == 0:
        return LLDSStatus(
            "off", "LLDS is off (coef=0): its metrics are measured, nothing is added to the loss."
        )
    if options.baseline == "reference":
        return LLDSStatus(
            "live",
            "LLDS is live: displacement is measured from the reference policy, which the policy equals until the "
            "first optimizer step.",
        )
    if options.baseline == "anchor":
        return LLDSStatus(
            "partial",
            "LLDS is live from the second optimizer step on: displacement is measured from an anchor 1 to "
            f"{options.anchor_every} optimizer steps old.",
        )
    accumulation = args.gradient_accumulation_steps
    micro_batches = args.steps_per_generation * args.num_iterations
    if accumulation % micro_batches == 0:
        return LLDSStatus("structural_zero", _structural_text(args))
    steps, rest = divmod(micro_batches, accumulation)
    often = "part of the optimizer steps" if rest else f"{steps - 1} of {steps} optimizer steps"
    return LLDSStatus(
        "partial",
        f"LLDS is live in {often} of each rollout; before the policy has changed it is zero by construction "
        f"({STRUCTURAL_METRIC} says when).",
    )


def _structural_text(args: Any) -> str:
    return (
        "LLDS: STRUCTURAL ZERO. The penalty cannot act, because each rollout is used up before the policy "
        f"changes: gradient_accumulation_steps={args.gradient_accumulation_steps} is a multiple of "
        f"steps_per_generation={args.steps_per_generation} x num_iterations={args.num_iterations}, so old "
        f"and new log-probs are the same. To mend it, {live_advice(args)}."
    )


def live_advice(args: Any) -> str:
    """Return what to change for two optimizer steps per rollout, or to do without."""
    micro_batches = -(-2 * args.gradient_accumulation_steps // args.num_iterations)
    batch = micro_batches * args.per_device_train_batch_size * args.world_size
    return (
        f"set steps_per_generation={micro_batches} (or generation_batch_size={batch}) for two optimizer steps per "
        'rollout, or keep the schedule and set the LLDS baseline to "anchor"'
    )


def dropout_warnings(model: nn.Module) -> list[str]:
    """Return a sentence for each kind of dropout that is on in ``model``; empty if old and new can agree.

    Dropout moves the log-probs of an unchanged policy, and any drop, however small, opens a gate: with LoRA
    dropout of 0.05 more than half of them.
    """
    warnings = []
    modules = [(name, module.p) for name, module in model.named_modules() if isinstance(module, nn.Dropout)]
    if worst := _largest(modules):
        warnings.append(
            f"Dropout is on ({worst[0]}, p={worst[1]:g}), so LLDS penalises noise; set disable_dropout=True "
            "in the trainer's config (it covers lora_dropout too)."
        )
    attention = [(name, getattr(module, "attention_dropout", 0)) for name, module in model.named_modules()]
    if worst := _largest(attention):
        warnings.append(
            f"Attention dropout is on ({worst[0]}, p={worst[1]:g}), so LLDS penalises noise, and "
            "disable_dropout does not reach it; load the model with attention_dropout=0.0 "
            "(model_init_kwargs, or its config)."
        )
    return warnings


def _largest(rates: Iterable[tuple[str, object]]) -> tuple[str, float] | None:
    found = [(name or "the model", p) for name, p in rates if isinstance(p, float) and p > 0]
    return max(found, key=lambda item: item[1], default=None)


def check_engine(trainer: Any, options: LLDSOptions) -> None:
    """Raise ``LLDSError`` for a baseline that this trainer cannot give. Alike on every process."""
    if options.baseline == "reference" and trainer.beta == 0:
        raise LLDSError(
            'baseline="reference" needs the reference policy, which TRL keeps only with beta above 0; set '
            'beta, or use baseline="anchor".'
        )
    if options.baseline == "anchor" and (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        raise LLDSError(
            'baseline="anchor" exchanges whole weights, which DeepSpeed and FSDP keep in pieces; use '
            'baseline="old" or "reference" there.'
        )
