"""The normaliser N of a whole optimizer batch, known before its first gradient."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from llds.engines.trl.config import LLDSOptions
from llds.engines.trl.rollout import sum_dtype
from llds.objective import llds_loss, normalizer_count

logger = logging.getLogger("llds.engines.trl")


class BatchCounter:
    """Counts what N counts over all micro-batches of an optimizer step and all processes.

    So λ means the same whatever the micro-batch size, the gradient accumulation and the number of processes.
    Exact where the optimizer batch lies in one rollout; where it spans several, each rollout's part stands
    for the parts that don't exist yet.
    """

    def __init__(self, trainer: Any, options: LLDSOptions) -> None:
        self._trainer = trainer
        self._options = options
        self._count = torch.zeros(())
        self._valid_for = 0
        self._is_warned = False

    def reset(self) -> None:
        """Forget the count: a new optimizer step begins."""
        self._valid_for = 0

    def count(self, inputs: dict[str, Any], position: int) -> Tensor:
        """Return N, 0-dim. ``position``: micro-batches of this optimizer step before ``inputs``.

        Collective whenever a new part of the batch begins, which is at the same time on every process.
        """
        if self._valid_for == 0:
            batches = self._from(inputs, position)
            local = torch.stack([self._count_one(batch) for batch in batches]).sum()
            total = self._trainer.accelerator.reduce(local, "sum")
            share = len(batches) / self._trainer.current_gradient_accumulation_steps
            # A wider type would widen the loss with it.
            self._count = (total / share).float()
            self._valid_for = len(batches)
        self._valid_for -= 1
        return self._count

    def _from(self, inputs: dict[str, Any], position: int) -> list[dict[str, Any]]:
        """Return the micro-batches from ``inputs`` on, to the end of the optimizer step or of the rollout."""
        trainer = self._trainer
        buffer = trainer._buffered_inputs or []
        if buffer:
            left = trainer.current_gradient_accumulation_steps - position
            step, rollout = trainer._step, len(buffer) * trainer.num_iterations
            ahead = min(left, rollout - step % rollout)
            batches = [buffer[(step + i) % len(buffer)] for i in range(ahead)]
            if batches and batches[0] is inputs:
                return batches
        if not self._is_warned:
            logger.warning(
                "LLDS: the micro-batches don't come from TRL's buffer, so the normaliser is estimated from "
                "each one alone and depends a little on gradient accumulation."
            )
            self._is_warned = True
        return [inputs]

    def _count_one(self, inputs: dict[str, Any]) -> Tensor:
        mask, options = response_mask(inputs), self._options
        zeros = torch.zeros(mask.shape, device=mask.device)
        counted = llds_loss(
            zeros,
            zeros,
            inputs["advantages"],
            mask,
            preserve=options.preserve,
            advantage_tol=options.advantage_tol,
        )
        return normalizer_count(options.normalizer, counted.metrics).to(sum_dtype(mask.device))


def response_mask(inputs: dict[str, Any]) -> Tensor:
    """Return 1 on the tokens that the policy wrote, [B, T]. ``tool_mask`` alone has 1 on padding too."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
