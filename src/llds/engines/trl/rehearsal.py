"""The loss of a trainer, to be asked with chosen log-probs and advantages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from trl import GRPOTrainer

from llds.engines.trl import rollout
from llds.engines.trl.counting import response_mask

_FORWARD = "_get_per_token_logps_and_entropies"
OLD, REFERENCE, SAMPLING = "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"
#: Advantages so small that what the policy loss leaves of them drowns, and so large that none counts as 0.
_SMALL = 20.0


class Rehearsal:
    """``compute_loss`` of a trainer on one scored micro-batch, subclasses and patches included.

    TRL's forward pass is run once; after that it returns chosen log-probs, so that a question costs no pass
    through the model and holds no graph of it. What λ adds is the loss with λ less the loss without.
    """

    #: What the log-probs that displacement is measured from are called in a batch.
    measured_from = OLD
    _result: tuple[Any, ...] = ()
    _answers_without_gradient = False
    _is_in_forward = False

    def __init__(self, trainer: Any, inputs: dict[str, Any], coef: float) -> None:
        self.trainer, self.coef = trainer, coef
        self.inputs = _as_whole_rollout(trainer, inputs)
        self._loss(self.inputs, None, self.coef)
        if not self._result:
            raise RuntimeError("LLDS was not applied: compute_loss does not call TRL's forward pass.")
        #: The log-probs that TRL's own forward pass gives, [B, T].
        self.current: Tensor = self._result[0]

    @property
    def rows(self) -> int:
        """The number of responses."""
        return int(self.inputs["completion_ids"].shape[0])

    def term(self, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return what λ adds to the loss at these log-probs [B, T] and advantages [B]."""
        return self._term([self.batch(logprobs, advantages)], [logprobs])

    def cut_term(self, logprobs: Tensor, advantages: Tensor, parts: int) -> float:
        """Return the same with the batch cut into ``parts`` micro-batches of one optimizer step."""
        pieces, leaves = split(self.batch(logprobs, advantages), logprobs, parts)
        return float(self._term(pieces, leaves).detach())

    def term_as_is(self, advantages: Tensor) -> float:
        """Return what λ adds to the loss of the batch as it came, but for the advantages [B]."""
        leaf = self.current.clone().requires_grad_()
        inputs = {**self.inputs, "advantages": advantages.to(self.inputs["advantages"])}
        return float(self._term([inputs], [leaf]).detach())

    def reach(self, logprobs: Tensor, advantages: Tensor) -> float:
        """Return by how much the norms of the parameters' gradients change with λ; 0 if only by rounding.

        Runs the model, for one gradient at a time.
        """
        batch = self.batch(logprobs, advantages)
        without, within = (self._norms(batch, logprobs, coef) for coef in (0.0, self.coef))
        change = math.dist(without, within)
        return change if change > 1e-6 * math.hypot(*without) else 0.0

    def _norms(self, batch: dict[str, Any], logprobs: Tensor, coef: float) -> list[float]:
        loss = self._loss(batch, logprobs, coef, through_model=True)
        trained = [p for p in self.trainer.model.parameters() if p.requires_grad]
        if not loss.requires_grad or not trained:
            return [0.0]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        return [0.0 if g is None else float(g.double().norm()) for g in gradients]

    def whole_count(self, count: float) -> float:
        """Return the N of this process's loss: the mean over processes, whose gradients are averaged."""
        accelerator = self.trainer.accelerator
        total: Tensor = accelerator.reduce(torch.tensor(count, device=accelerator.device), "sum")
        processes: int = accelerator.num_processes
        return float(total) / processes

    def batch(self, logprobs: Tensor, advantages: Tensor) -> dict[str, Any]:
        """Return the batch as if the policy had been updated since, whatever the schedule is."""
        old = self.inputs.get(OLD)
        baseline = self.current if old is None else old
        return {
            **self.inputs,
            "advantages": advantages.to(self.inputs["advantages"]),
            OLD: baseline,
            REFERENCE: baseline,
            rollout.ROLLOUT_STEP: torch.tensor(self.trainer.state.global_step - 1),
        }

    def step(self, pieces: Sequence[dict[str, Any]], logprobs: Sequence[Tensor]) -> dict[str, float]:
        """Go through an optimizer step of these micro-batches; return the means that TRL would log."""
        metrics = self.trainer._metrics["train"]
        metrics.clear()
        self._losses(pieces, logprobs, self.coef)
        return {name: sum(values) / len(values) for name, values in metrics.items() if values}

    # --- the loss

    def _term(self, pieces: Sequence[dict[str, Any]], logprobs: Sequence[Tensor]) -> Tensor:
        with_llds, without = (self._losses(pieces, logprobs, coef) for coef in (self.coef, 0.0))
        return with_llds - without

    def _losses(
        self, pieces: Sequence[dict[str, Any]], logprobs: Sequence[Tensor], coef: float, start: int = 0
    ) -> Tensor:
        """Return the summed loss of an optimizer step of these micro-batches."""
        losses = []
        for index, (piece, chosen) in enumerate(zip(pieces, logprobs, strict=True)):
            begin_step(self.trainer, pieces, index)
            losses.append(self._loss(piece, chosen, coef, start, is_begun=True))
            start += piece["completion_ids"].shape[0]
        return torch.stack(losses).sum()

    def _loss(
        self,
        inputs: dict[str, Any],
        logprobs: Tensor | None,
        coef: float,
        start: int = 0,
        *,
        through_model: bool = False,
        is_begun: bool = False,
    ) -> Tensor:
        trainer = self.trainer
        self._set_coef(coef)
        if not is_begun:
            begin_step(trainer, [inputs])
        with self._exchanged(logprobs, start, through_model), trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(trainer.model, inputs)
        return loss

    def _set_coef(self, coef: float) -> None:
        self.trainer.llds.options = replace(self.trainer.llds.options, coef=coef)

    @contextmanager
    def _exchanged(self, logprobs: Tensor | None, start: int, through_model: bool) -> Iterator[None]:
        """Let TRL's forward pass return ``logprobs``, those of the rows from ``start`` on."""
        forward = getattr(GRPOTrainer, _FORWARD)

        def exchanged(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if owner is not self.trainer or not (torch.is_grad_enabled() or self._answers_without_gradient):
                return forward(owner, *args, **kwargs)
            if logprobs is None:
                self._is_in_forward = True
                try:
                    result = forward(owner, *args, **kwargs)
                finally:
                    self._is_in_forward = False
                parts = result if isinstance(result, tuple) else (result,)
                self._result = tuple(part.detach() if isinstance(part, Tensor) else part for part in parts)
                return result
            if through_model:
                result = forward(owner, *args, **kwargs)
                return (logprobs.detach() + (result[0] - result[0].detach()), *result[1:])
            return (logprobs, *(self._part(one, start, len(logprobs)) for one in self._result[1:]))

        with mock.patch.object(GRPOTrainer, _FORWARD, exchanged):
            yield

    def _part(self, value: Any, start: int, count: int) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() and value.shape[0] == self.rows
        return value[start : start + count] if has_rows else value


class OwnRehearsal(Rehearsal):
    """The loss of a trainer with a penalty of its own, whose λ can't be set.

    The policy loss is proportional to advantages of one sign each, so twice the loss at small advantages less
    the loss at ones twice as large is what does not depend on their size: the penalty. The KL is kept at 0 and
    the entropy bonus off.
    """

    _answers_without_gradient = True

    def __init__(self, trainer: Any, inputs: dict[str, Any], coef: float, advantage_tol: float) -> None:
        self._small = _SMALL * max(advantage_tol, 1e-4)
        trainer._entropy_bonus_enabled = False
        #: Whether the loss runs the model beside TRL's forward pass, where no log-probs can be chosen.
        self.has_passes_of_its_own = False
        hook = trainer.model.register_forward_hook(self._notice)
        try:
            super().__init__(trainer, inputs, coef)
        finally:
            hook.remove()

    def _notice(self, *called: Any) -> None:
        self.has_passes_of_its_own |= not self._is_in_forward

    def batch(self, logprobs: Tensor, advantages: Tensor) -> dict[str, Any]:
        """Return the batch as if the policy had been updated since, with a KL of 0."""
        chosen = logprobs.detach()
        batch = {**super().batch(logprobs, advantages), REFERENCE: chosen}
        if self.measured_from != OLD:
            batch |= {self.measured_from: batch[OLD], OLD: chosen}
        return batch

    def reach(self, logprobs: Tensor, advantages: Tensor) -> float:
        """Return by how much the norms of the parameters' gradients change when log-probs fall."""
        baseline = super().batch(self.current, advantages)[OLD]

        def change(chosen: Tensor) -> float:
            still, moved = (self._norms(self.batch(one, chosen), one, 0.0) for one in (baseline, logprobs))
            found = math.dist(still, moved)
            return found if found > 1e-6 * math.hypot(*still) else 0.0

        # At advantage 0 the policy loss has no gradient to be mistaken for the penalty's.
        return change(advantages * 0) or change(advantages.clamp(min=0) * self._small)

    def _term(self, pieces: Sequence[dict[str, Any]], logprobs: Sequence[Tensor]) -> Tensor:
        def at(size: float) -> Tensor:
            scaled = [{**piece, "advantages": piece["advantages"] * size} for piece in pieces]
            return self._losses(scaled, logprobs, self.coef)

        return 2 * at(self._small) - at(2 * self._small)

    def _set_coef(self, coef: float) -> None:
        pass

    def operations_of_its_own(self) -> int:
        """Count the operations of a penalty (maxima, gates) in the graph of the loss beside TRL's own."""
        leaf = self.current.clone().requires_grad_()
        batch = self.batch(leaf, torch.zeros(self.rows))
        mine = _operations(self._loss(batch, leaf, self.coef))
        begin_step(self.trainer, [batch])
        with self._exchanged(leaf, 0, through_model=False):
            theirs = _operations(GRPOTrainer._compute_loss(self.trainer, self.trainer.model, batch))
        return (mine - theirs).total()


def _as_whole_rollout(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a micro-batch with the token count of a rollout that it is all of."""
    if "num_items_in_batch" not in inputs:
        return dict(inputs)
    count = trainer.accelerator.reduce(response_mask(inputs).sum(), "sum")
    return {**inputs, "num_items_in_batch": count.to(inputs["num_items_in_batch"].dtype)}


def begin_step(trainer: Any, batches: Sequence[dict[str, Any]], index: int = 0) -> None:
    """Make the trainer believe that ``batches`` are a rollout and an optimizer step, ``index`` of them done."""
    trainer._buffered_inputs = list(batches)
    trainer._step = index
    trainer.args.steps_per_generation = len(batches)
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.accelerator.gradient_state._set_sync_gradients(index == len(batches) - 1)


def cut(inputs: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Cut a micro-batch into smaller ones."""
    rows = inputs["completion_ids"].shape[0]
    size = -(-rows // parts)
    return [
        {
            name: value[start : start + size]
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows
            else value
            for name, value in inputs.items()
        }
        for start in range(0, rows, size)
    ]


def split(inputs: dict[str, Any], logprobs: Tensor, parts: int) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Cut a micro-batch, and log-probs [B, T] for it that carry a gradient, into smaller ones."""
    pieces = cut(inputs, parts)
    leaf = logprobs.detach().clone().requires_grad_()
    sizes = [len(piece["completion_ids"]) for piece in pieces]
    return pieces, list(torch.split(leaf, sizes))


_OF_A_PENALTY = ("Relu", "Clamp", "Maximum", "Where", "Threshold", "MaskedFill", "Max")


def _operations(loss: Tensor) -> Counter[str]:
    """Count those operations of a graph that a penalty is made of."""
    seen: set[Any] = set()
    found: Counter[str] = Counter()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__.startswith(_OF_A_PENALTY):
            found[type(node).__name__] += 1
        waiting += [below for below, _ in node.next_functions]
    return found
