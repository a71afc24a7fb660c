"""The state of LLDS in one trainer: the term that it adds to a micro-batch's loss, and what it measures."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import TrainerCallback

from llds.dynamics import Measure
from llds.engines.trl import rollout
from llds.engines.trl.checks import LLDSStatus, check_engine, dropout_warnings, structural_status
from llds.engines.trl.config import LLDSOptions
from llds.engines.trl.counting import BatchCounter, response_mask
from llds.engines.trl.monitor import RunMonitor
from llds.engines.trl.window import StepRecord, Window, make_record
from llds.errors import LLDSError
from llds.files import atomic_write_bytes
from llds.objective import RATIOS, LaggedAnchor, llds_loss

logger = logging.getLogger("llds.engines.trl")

#: Called in every micro-batch with (logprobs, old_logprobs, advantages, response_mask, inputs): tensors [B,
#: T], advantages [B], no gradient; ``inputs`` is TRL's batch. ``old_logprobs`` is the baseline that LLDS was
#: given.
Observer = Callable[[Tensor, Tensor, Tensor, Tensor, dict[str, Any]], None]
#: Called once per optimizer step, on every process, when the loss of its last micro-batch is made. Its
#: backward pass is still to come, so gradients and weights are not yet those of the step.
StepHook = Callable[[StepRecord], None]

ANCHOR_FILE = "llds_anchor.safetensors"


@dataclass(frozen=True)
class Forward:
    """What one forward pass gave, each [B, T] in nats: log-probs, entropies without gradient, and the
    anchor's log-probs.
    """

    logprobs: Tensor
    entropies: Tensor | None = None
    anchored: Tensor | None = None


class LLDSRuntime:
    """LLDS in one trainer; ``trainer.llds``.

    ``options``, ``status``: what was set, and whether it can act. ``observers``, ``step_hooks``: lists to add
    callables to; collectives in them must run on every process. ``last_step``: the record of the latest
    optimizer step. ``monitor``: where the run stands, and its own list of hooks.
    """

    def __init__(self, trainer: Any, options: LLDSOptions) -> None:
        check_engine(trainer, options)
        self.options = options
        self.status: LLDSStatus = structural_status(trainer.args, options)
        self.observers: list[Observer] = []
        self.step_hooks: list[StepHook] = []
        self.last_step: StepRecord | None = None
        self.anchor: LaggedAnchor | None = None
        self.verdicts: Counter[str] = Counter()
        self._trainer = trainer
        self._is_told = False
        self._captured: list[Forward] | None = None
        self.monitor = RunMonitor(trainer, options)
        self._window = self._new_window()
        self._counter = BatchCounter(trainer, options)
        trainer.add_callback(_Lifecycle(self))

    # --- one training run

    def begin(self) -> None:
        """Start a run: nothing is left of an interrupted optimizer step, and what cannot work is said."""
        self.reset_step()
        self._captured = None
        self.verdicts.clear()
        self.monitor.begin()
        if self.options.baseline == "anchor":
            self._begin_anchor()
        if not self._trainer.accelerator.is_main_process:
            return
        # Python hides what is no warning unless told otherwise, and nobody should have to ask whether LLDS is on.
        is_news = self.status.kind != "off" and not self._is_told
        is_zero = self.status.kind == "structural_zero"
        logger.log(logging.WARNING if is_zero or is_news else logging.INFO, self.status.text)
        self._is_told = True
        if self.options.coef > 0:
            for sentence in dropout_warnings(self._trainer.model):
                logger.warning("LLDS: %s", sentence)

    def end(self) -> None:
        """Say at the end of a run how often LLDS acted."""
        if not self._trainer.accelerator.is_main_process or not self.verdicts or self.options.coef == 0:
            return
        told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.verdicts.items()))
        never = "active" not in self.verdicts
        logger.log(
            logging.WARNING if never else logging.INFO,
            "LLDS in %d optimizer steps: %s.",
            self.verdicts.total(),
            told,
        )

    def _begin_anchor(self) -> None:
        resumed = self._trainer.state.global_step > 0
        if not resumed:
            self.anchor = LaggedAnchor(self._trainer.model, self.options.anchor_every)
        elif self.anchor is None:
            raise LLDSError(
                f'The checkpoint has no {ANCHOR_FILE}, since it was written without baseline="anchor"; '
                "start anew, or resume with the baseline that it was written with."
            )

    def reset_step(self) -> None:
        """Forget the micro-batches of an optimizer step that was not finished."""
        self._window = self._new_window()
        self._counter.reset()

    def _new_window(self) -> Window:
        options = self.options
        how = Measure(
            lld_epsilon=options.lld_epsilon,
            advantage_tol=options.advantage_tol,
            gate=options.gate,
            dead_zone=options.dead_zone,
        )
        return Window(how, self._trainer.accelerator.device)

    def set_coef(self, coef: float) -> None:
        """Change λ from the next micro-batch on, on this process; do the same on every other.

        Raises ``LLDSError`` for a value that cannot be meant.
        """
        self.options = replace(self.options, coef=coef)
        self.status = structural_status(self._trainer.args, self.options)

    def save(self, folder: str) -> None:
        """Write the anchor and what the monitor remembers into a checkpoint folder."""
        self.monitor.save(folder)
        if self.anchor is not None:
            atomic_write_bytes(Path(folder, ANCHOR_FILE), save(self.anchor.state_dict()))

    def load(self, folder: str) -> None:
        """Read from a checkpoint folder what :meth:`save` wrote, as far as it is there."""
        self.monitor.load(folder)
        self.anchor = None
        path = Path(folder, ANCHOR_FILE)
        if self.options.baseline == "anchor" and path.exists():
            self.anchor = LaggedAnchor(self._trainer.model, self.options.anchor_every)
            self.anchor.load_state_dict(load_file(path))

    # --- one micro-batch

    @contextmanager
    def capturing(self) -> Iterator[list[Forward]]:
        """Collect what the forward passes with a gradient give."""
        captured: list[Forward] = []
        self._captured = captured
        try:
            yield captured
        finally:
            self._captured = None

    def observe_forward(self, forward: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Any:
        """Run TRL's forward pass, and keep its log-probs if a loss is being computed."""
        if self._captured is None or not torch.is_grad_enabled():
            return forward(model, *args, **kwargs)
        anchored = self._anchor_logprobs(forward, args, kwargs)
        result = forward(model, *args, **kwargs)
        logprobs = _logprobs_of(result)
        if logprobs.requires_grad:
            self._captured.append(Forward(logprobs, _entropies_of(result, logprobs), anchored))
        return result

    def _anchor_logprobs(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
        """Repeat a forward pass with the anchor's weights, without dropout and without a gradient."""
        if self.anchor is None:
            return None
        model = self._trainer.model
        model.eval()
        try:
            with self.anchor.applied():
                result = forward(model, *args, **kwargs)
        finally:
            model.train()
        return _logprobs_of(result).detach()

    def add_term(self, loss: Tensor, inputs: dict[str, Any], captured: list[Forward]) -> Tensor:
        """Return ``loss`` with the LLDS term of this micro-batch; at the last one, close the optimizer step.

        With λ = 0 it is ``loss`` itself. Raises ``RuntimeError``, on every process and before the optimizer
        acts, if the log-probs of any micro-batch of any process did not pass through the wrapped method
        exactly once.
        """
        accelerator = self._trainer.accelerator
        mask = response_mask(inputs)
        unseen = len(captured) != 1
        # One process must not stop alone: the others would wait for it. So it goes on without, and says so
        # below.
        seen = Forward(torch.zeros(mask.shape, device=mask.device)) if unseen else captured[0]
        logprobs = seen.logprobs
        old = logprobs.detach() if unseen else self._baseline(inputs, logprobs.detach(), seen.anchored)
        coef = self.options.coef_at(self._trainer.state.global_step)
        output = llds_loss(
            logprobs,
            old,
            inputs["advantages"],
            mask,
            coef=coef,
            token_count=self._counter.count(inputs, self._window.micro_batches) / accelerator.num_processes,
            **self._answer(inputs),
            **self.options.loss_options(),
        )
        additive = {name: value for name, value in output.metrics.items() if name not in RATIOS}
        self._window.add({**additive, "loss": output.loss, **self._extras(inputs, mask, unseen)})
        if not unseen:
            self._measure(inputs, seen, mask)
        for observer in () if unseen else self.observers:
            observer(logprobs.detach(), old, inputs["advantages"], mask, inputs)
        if accelerator.sync_gradients:
            self._close(coef)
        return loss if coef == 0 or unseen else loss + output.loss

    def _measure(self, inputs: dict[str, Any], seen: Forward, mask: Tensor) -> None:
        """Add the micro-batch to the series of the step, measured from the policy that sampled."""
        logprobs = seen.logprobs.detach()
        old = inputs.get("old_per_token_logps")
        self._window.dynamics.add(
            logprobs,
            logprobs if old is None else old,
            inputs["advantages"],
            mask,
            answer_mask=inputs.get(rollout.ROW_ANSWER_MASK),
            entropies=seen.entropies,
            first_search=inputs.get(rollout.ROW_FIRST_SEARCH),
            updates=self._updates_since_rollout(inputs),
        )

    def _updates_since_rollout(self, inputs: dict[str, Any]) -> int | None:
        """Return the optimizer steps between sampling this batch and now; None where nobody noted it."""
        sampled = inputs.get(rollout.ROLLOUT_STEP)
        return None if sampled is None else self._trainer.state.global_step - int(sampled)

    def _baseline(self, inputs: dict[str, Any], logprobs: Tensor, anchored: Tensor | None) -> Tensor:
        if self.options.baseline == "anchor":
            assert anchored is not None
            return anchored
        if self.options.baseline == "reference":
            reference: Tensor = inputs["ref_per_token_logps"]
            return reference
        # TRL leaves the key out where old and new are the same by construction.
        old: Tensor | None = inputs.get("old_per_token_logps")
        return logprobs if old is None else old

    def _answer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if self.options.answer_weight is None:
            return {}
        if rollout.ROW_ANSWER_MASK not in inputs:
            raise LLDSError(
                "answer_weight is set, but the trainer's own rollout code dropped the answer mask."
            )
        return {
            "answer_mask": inputs[rollout.ROW_ANSWER_MASK],
            "answer_weight": inputs[rollout.ROW_ANSWER_WEIGHT],
        }

    def _extras(self, inputs: dict[str, Any], mask: Tensor, unseen: bool) -> dict[str, Tensor]:
        """Return the sums that the objective doesn't know: batches, whether LLDS could act in them, and where
        old and new were taken to be the same.
        """
        old = inputs.get("old_per_token_logps")
        fresh = self._updates_since_rollout(inputs) == 0
        structural = {"old": old is None or fresh, "anchor": self.anchor is not None and self.anchor.lag == 0}
        numbers = {
            "batches": 1,
            "structural_batches": structural.get(self.options.baseline, False),
            "assumed_batches": old is None,
            "unseen": unseen,
        }
        return {name: torch.tensor(float(value), device=mask.device) for name, value in numbers.items()}

    # --- one optimizer step

    def _close(self, coef: float) -> None:
        trainer = self._trainer
        sums, series = self._window.reduce(trainer.accelerator)
        self._window = self._new_window()
        self._counter.reset()
        if sums["unseen"] > 0:
            raise RuntimeError(
                "LLDS was not applied: the log-probs did not pass through "
                f"_get_per_token_logps_and_entropies exactly once in {sums['unseen']:.0f} of "
                f"{sums['batches']:.0f} micro-batches, because {type(trainer).__name__} computes its loss "
                "another way than TRL's GRPOTrainer; let its compute_loss call super().compute_loss(), or "
                "train without LLDS."
            )
        if (
            self.options.baseline == "reference"
            and trainer.state.global_step == 0
            and not sums["moved_tokens"]
        ):
            # The policy still is the reference.
            sums["structural_batches"] = sums["batches"]
        record = make_record(trainer.state.global_step, coef, sums, series, trainer.accelerator.num_processes)
        self.last_step = record
        self.verdicts[record.verdict] += 1
        for name, value in record.metrics.items():
            trainer._metrics["train"][name].append(value)
        for hook in self.step_hooks:
            hook(record)

    # --- one rollout

    def annotate(
        self, rows: rollout.Rows, batch: dict[str, Any], *, failed: int | None, training: bool
    ) -> None:
        """Take failed episodes out of a scored batch, and add what the loss needs to know. Collective."""
        trainer = self._trainer
        if failed is not None:
            trainer._metrics["train" if training else "eval"][rollout.FAILED_METRIC].append(float(failed))
        if failed:
            rollout.mask_failed(trainer.accelerator, rows, batch)
        if training:
            batch[rollout.ROLLOUT_STEP] = torch.tensor(trainer.state.global_step)
            rollout.add_answers(trainer.accelerator, self.options, rows, batch)
            rollout.add_first_searches(
                trainer.accelerator, trainer.num_generations, self.options.advantage_tol, rows, batch
            )


def _entropies_of(result: Any, logprobs: Tensor) -> Tensor | None:
    """Return the entropies [B, T] of a forward pass, if it has any; TRL puts them after the log-probs."""
    second = result[1] if isinstance(result, tuple) and len(result) > 1 else None
    return second.detach() if isinstance(second, Tensor) and second.shape == logprobs.shape else None


def _logprobs_of(result: Any) -> Tensor:
    """Return the log-probs [B, T] of a forward pass; what comes beside them depends on TRL's version."""
    logprobs: Tensor = result[0] if isinstance(result, tuple) else result
    return logprobs


class _Lifecycle(TrainerCallback):
    """Tells the runtime when a run begins and ends, and the anchor when the optimizer is about to act."""

    def __init__(self, runtime: LLDSRuntime) -> None:
        self._runtime = runtime

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._runtime.begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._runtime.anchor is not None:
            self._runtime.anchor.before_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._runtime.end()
