"""What LLDS remembers in one actor between verl's calls of its loss: the optimizer step, and its verdict."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llds.dynamics import Measure
from llds.engines.verl import batch
from llds.engines.verl.loss import BatchInfo, llds_term
from llds.engines.verl.metrics import StepSums, Window
from llds.engines.verl.options import LLDSOptions, RunFacts
from llds.objective import answer_weight_from_searches

logger = logging.getLogger("llds.engines.verl")

#: Optimizer steps without any movement after which a schedule that is not known counts as one that can't move.
PATIENCE = 8
REMEDY = (
    "set actor_rollout_ref.actor.ppo_mini_batch_size to half of data.train_batch_size or less, or "
    "actor_rollout_ref.actor.ppo_epochs=2, or hold another baseline (llds_baseline=reference)"
)


class LossState:
    """LLDS in one actor.

    ``options``, ``facts``: what was set, and what is known of the schedule. ``steps``: optimizer steps done.
    """

    def __init__(self, options: LLDSOptions, run: Mapping[str, Any] | None = None) -> None:
        self.options = options
        self.facts = RunFacts.of(run)
        self.steps = 0
        self._structural_steps = 0
        self._is_told = False
        self._searches: list[int] = []
        self._mean_searches: float | None = None
        self._window = self._new_window()

    def observe(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the term of one micro-batch and, with the last one of an optimizer step, what to log.

        The tensors as verl's losses get them, [B, T]; ``config``: verl's ``ActorConfig``. A call without
        gradients, as in an evaluation, is not counted.
        """
        info = BatchInfo.of(config.global_batch_info)
        is_held = self.options.baseline == "reference"
        held = batch.reference_logprobs(logprobs) if is_held else old_logprobs
        answer = self._answers(response_mask)
        output = llds_term(logprobs, held, advantages, response_mask, self.options, info, **answer)
        if not torch.is_grad_enabled():
            return output.loss, {}
        sampled = {
            "logprobs": logprobs,
            "old_logprobs": old_logprobs,
            "advantages": advantages,
            "response_mask": response_mask,
            "answer_mask": answer.get("answer_mask"),
            "updates": self._age(),
        }
        self._window.add(output.loss, output.metrics, sampled)
        is_last = info.responses_here is None or self._window.rows >= info.responses_here
        return output.loss, self._close(info, answer.get("answer_weight")) if is_last else {}

    def _new_window(self) -> Window:
        options = self.options
        return Window(
            Measure(
                lld_epsilon=options.lld_epsilon,
                advantage_tol=options.advantage_tol,
                gate=options.gate,
                dead_zone=options.dead_zone,
            )
        )

    def _age(self) -> int | None:
        """Return the optimizer steps since the rollout, None where the schedule is not known."""
        per_rollout = self.facts.updates_per_rollout
        return None if per_rollout is None else self.steps % per_rollout

    def _answers(self, response_mask: Tensor) -> dict[str, Any]:
        weight = self.options.answer_weight
        if weight is None:
            return {}
        mask, searches = batch.answers(response_mask)
        self._searches += searches
        if not isinstance(weight, str):
            return {"answer_mask": mask, "answer_weight": weight}
        # Every micro-batch of an optimizer step must have the same weight, so it is that of the step before.
        seen = self._mean_searches
        if seen is None and self._searches:
            seen = sum(self._searches) / len(self._searches)
        if seen is None:
            return {"answer_mask": mask, "answer_weight": 1.0}
        auto = answer_weight_from_searches(torch.tensor(seen), self.options.answer_searches)
        return {"answer_mask": mask, "answer_weight": float(auto)}

    def _close(self, info: BatchInfo, answer_weight: float | None) -> dict[str, float]:
        """End the optimizer step: read its sums, and say once where nothing can be penalised."""
        sums = self._window.read()
        structural = sums.is_unmoved or self._is_fresh()
        metrics = sums.metrics(info, structural, self.options.coef)
        if answer_weight is not None:
            metrics["llds/answer_weight"] = answer_weight
        if self._searches:
            self._mean_searches = sum(self._searches) / len(self._searches)
            metrics["llds/valid_searches"] = self._mean_searches
        self._searches = []
        self.steps += 1
        self._structural_steps += structural
        self._tell(sums)
        self._window = self._new_window()
        return metrics

    def _is_fresh(self) -> bool:
        """Say whether the policy to hold is the present one, by the schedule."""
        return self.options.baseline == "old" and not self.facts.bypass and self._age() == 0

    def _tell(self, sums: StepSums) -> None:
        if self._is_told or self.options.coef == 0 or self._structural_steps < self.steps:
            return
        by_schedule = self._is_fresh() and self.facts.updates_per_rollout == 1
        if not by_schedule and self.steps < PATIENCE:
            return
        self._is_told = True
        if not _is_main_rank():
            return
        why = (
            "each rollout gets one optimizer step"
            if by_schedule
            else f"in the first {self.steps} optimizer steps no log-prob differed from the one to hold"
        )
        noise = "" if sums.is_unmoved else " What llds/loss shows is numerical noise (llds/noise_floor)."
        logger.warning(
            "LLDS: STRUCTURAL ZERO. The penalty cannot act: %s, so old and new policy are the same.%s To mend "
            "it, %s.",
            why,
            noise,
            REMEDY,
        )


def _is_main_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
