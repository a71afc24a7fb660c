"""The preflight of a TRL trainer: its configuration, and what its own loss does on one real batch.

The batch is probed through ``compute_loss`` of the trainer as it is, subclasses and patches included. TRL's
forward pass is run, but the log-probs that it returns are exchanged for chosen ones, which keep their
gradient. Weights, gradients, random numbers, metrics and the state of the trainer are afterwards what they
were.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from trl import GRPOTrainer

from llds.engines.trl import rollout
from llds.engines.trl.checks import STRUCTURAL_METRIC, dropout_warnings, live_advice
from llds.engines.trl.config import LLDSGRPOConfig, LLDSOptions
from llds.engines.trl.counting import response_mask
from llds.preflight import Finding, Intent, ProbeBatch, Report, Setup, check_setup, merge, probe_term

_FORWARD = "_get_per_token_logps_and_entropies"
NAMES = {
    "steps_per_rollout": "steps_per_generation, num_iterations, gradient_accumulation_steps",
    "coef": "llds_coef",
    "gate": "llds_gate",
    "normalizer": "llds_normalizer",
    "baseline": "llds_baseline",
    "preserve": "llds_preserve",
    "advantage_tol": "llds_advantage_tol",
    "answer_weight": "llds_answer_weight",
    "group_size": "num_generations",
    "kl_in_loss": "beta",
    "logging_steps": "logging_steps",
    "is_attached": "the trainer class",
    "attach_advice": "use LLDSGRPOTrainer, or call attach_llds(trainer, coef=0.2) before trainer.train()",
}


def preflight(trainer: Any, inputs: dict[str, Any] | None = None) -> Report:
    """Look for L1 to L14 in a ``GRPOTrainer`` before ``train()``; see docs/preflight.md.

    ``inputs``: a scored micro-batch as ``compute_loss`` gets it, fresh from a rollout. Without it one rollout
    is made (and the dataset is where it was afterwards). Collective; call it on every process.
    """
    static = check_setup(setup_of(trainer))
    dropout = [
        Finding("L3", "likely", sentence, "dropout", "switch it off")
        for sentence in dropout_warnings(trainer.model)
    ]
    reports = [static, Report(tuple(dropout), ("L3",))]
    if getattr(trainer, "llds", None) is None or trainer.llds.options.coef == 0:
        return merge(reports)
    with undisturbed(trainer):
        batch = first_micro_batch(trainer) if inputs is None else inputs
        reports.append(probe_trainer(trainer, batch))
    return merge(reports)


def setup_of(trainer: Any) -> Setup:
    """Return what a trainer's configuration says."""
    runtime = getattr(trainer, "llds", None)
    args = trainer.args
    options = runtime.options if runtime else args.llds_options() if _has_llds(args) else None
    return setup_of_args(args, options, is_attached=runtime is not None if options else None)


def setup_of_args(args: Any, options: LLDSOptions | None, is_attached: bool | None = None) -> Setup:
    """Return what a ``GRPOConfig`` and the settings of LLDS say; ``options`` None without LLDS."""
    micro_batches = (args.steps_per_generation or args.gradient_accumulation_steps) * args.num_iterations
    steps = Fraction(micro_batches, args.gradient_accumulation_steps)
    llds = {} if options is None else _llds_settings(options)
    return Setup(
        engine="trl",
        is_attached=is_attached,
        steps_per_rollout=steps,
        group_size=args.num_generations,
        kl_in_loss=args.beta,
        kl_in_reward=0.0,
        # TRL recomputes old log-probs with the trained weights wherever they can differ.
        old_from_inference=False,
        logging_steps=int(args.logging_steps) if args.logging_steps >= 1 else None,
        names=NAMES,
        live_advice=live_advice(args),
        **llds,
    )


def _llds_settings(options: LLDSOptions) -> dict[str, Any]:
    names = ("coef", "gate", "normalizer", "baseline", "preserve", "advantage_tol", "answer_weight")
    return {name: getattr(options, name) for name in names}


def _has_llds(args: Any) -> bool:
    return isinstance(args, LLDSGRPOConfig)


# --- one batch


def first_micro_batch(trainer: Any) -> dict[str, Any]:
    """Make one rollout and return its first micro-batch, as training would."""
    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    found: dict[str, Any] = trainer._prepare_inputs(rows)
    return found


def probe_trainer(trainer: Any, inputs: dict[str, Any]) -> Report:
    """Probe the loss of a trainer on one scored micro-batch; disturbs the trainer."""
    options = trainer.llds.options
    loss = _ProbedLoss(trainer, inputs, options.coef)
    try:
        current = loss.current()
    except RuntimeError as error:
        if "LLDS was not applied" not in str(error):
            raise
        change = "let compute_loss call super().compute_loss()"
        return Report((Finding("L9", "certain", str(error), "compute_loss", change),), ("L9",))
    batch = _batch_of(trainer, inputs, current)
    weight = inputs.get(rollout.ROW_ANSWER_WEIGHT)
    intent = Intent(
        coef=options.coef,
        gate=options.gate,
        normalizer=options.normalizer,
        preserve=options.preserve,
        advantage_tol=options.advantage_tol,
        dead_zone=options.dead_zone,
        huber_width=options.huber_width if options.penalty == "huber" else 0.0,
        answer_weight=1.0 if weight is None or options.answer_weight is None else float(weight),
    )
    report = probe_term(loss.term, batch, intent, loss.reach, loss.whole_count)
    if any(one.fault == "L9" for one in report.findings):
        return report
    return merge([report, _metrics_report(loss), _zero_report(loss)])


def _batch_of(trainer: Any, inputs: dict[str, Any], current: Tensor) -> ProbeBatch:
    old = inputs.get("old_per_token_logps")
    sampled = inputs.get(rollout.ROLLOUT_STEP)
    ids = inputs["completion_ids"]
    decode = trainer.processing_class.decode
    return ProbeBatch(
        baseline=current if old is None else old,
        response_mask=response_mask(inputs),
        attention=inputs["completion_mask"],
        current=current,
        is_fresh=sampled is None or int(sampled) == trainer.state.global_step,
        reference=inputs.get("ref_per_token_logps"),
        inference=inputs.get("sampling_per_token_logps"),
        answer_mask=inputs.get(rollout.ROW_ANSWER_MASK),
        feedback=_feedback(trainer, ids, inputs),
        advantages=inputs["advantages"] if inputs["advantages"].dim() == 1 else None,
        texts=[[decode([token]) for token in row] for row in ids.tolist()],
    )


def _feedback(trainer: Any, ids: Tensor, inputs: dict[str, Any]) -> Tensor | None:
    """Return the tokens that a tool wrote as far as they show: between the protocol's tags, or without a
    sampled log-prob where the rollout gives one for every other token.
    """
    sampled: Tensor | None = inputs.get("sampling_per_token_logps")
    if sampled is not None:
        silent: Tensor = (sampled == 0) & inputs["completion_mask"].bool()
        return silent
    tokenizer = trainer.processing_class
    tags = [tokenizer.convert_tokens_to_ids(tag) for tag in ("<information>", "</information>")]
    if any(tag is None or tag == tokenizer.unk_token_id or tag == tokenizer.pad_token_id for tag in tags):
        return None
    starts, ends = ids == tags[0], ids == tags[1]
    inside: Tensor = (starts.long().cumsum(1) > ends.long().cumsum(1)) | ends
    return inside


@dataclass
class _ProbedLoss:
    """``compute_loss`` of a trainer with chosen log-probs and advantages."""

    trainer: Any
    inputs: dict[str, Any]
    coef: float
    _seen: list[Tensor] = field(default_factory=list)

    def current(self) -> Tensor:
        """Return the log-probs that TRL's own forward pass gives, [B, T]."""
        self._loss(self.inputs, None, self.coef)
        if not self._seen:
            raise RuntimeError("LLDS was not applied: compute_loss does not call TRL's forward pass.")
        return self._seen[0]

    def term(self, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return what λ adds to the loss at these log-probs [B, T] and advantages [B]."""
        inputs = self._batch(advantages)
        return self._loss(inputs, logprobs, self.coef) - self._loss(inputs, logprobs, 0.0)

    def reach(self, logprobs: Tensor, advantages: Tensor) -> float:
        """Return the norm of the gradient that the penalty has in the trained parameters."""
        value = self.term(logprobs, advantages)
        if not value.requires_grad:
            return 0.0
        parameters = [p for p in self.trainer.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        return math.sqrt(sum(float(g.double().square().sum()) for g in gradients if g is not None))

    def whole_count(self, count: float) -> float:
        """Return the N of this process's loss: the mean over processes, whose gradients are averaged."""
        accelerator = self.trainer.accelerator
        total: Tensor = accelerator.reduce(torch.tensor(count, device=accelerator.device), "sum")
        processes: int = accelerator.num_processes
        return float(total) / processes

    def _batch(self, advantages: Tensor) -> dict[str, Any]:
        """Return the batch as if the policy had been updated since, whatever the schedule is."""
        old = self.inputs.get("old_per_token_logps")
        baseline = self._seen[0] if old is None else old
        return {
            **self.inputs,
            "advantages": advantages.to(self.inputs["advantages"]),
            "old_per_token_logps": baseline,
            "ref_per_token_logps": baseline,
            rollout.ROLLOUT_STEP: torch.tensor(self.trainer.state.global_step - 1),
        }

    def _loss(self, inputs: dict[str, Any], logprobs: Tensor | None, coef: float) -> Tensor:
        trainer = self.trainer
        trainer.llds.options = replace(trainer.llds.options, coef=coef)
        _begin_step(trainer, [inputs])
        with self._exchanged(logprobs):
            loss: Tensor = trainer.compute_loss(trainer.model, inputs)
        return loss

    @contextmanager
    def _exchanged(self, logprobs: Tensor | None) -> Iterator[None]:
        """Let TRL's forward pass return ``logprobs``, with the gradient of both."""
        forward = getattr(GRPOTrainer, _FORWARD)

        def exchanged(owner: Any, *args: Any, **kwargs: Any) -> Any:
            result = forward(owner, *args, **kwargs)
            if not torch.is_grad_enabled():
                return result
            own = result[0]
            self._seen.append(own.detach())
            if logprobs is None:
                return result
            return (logprobs + (own - own.detach()), *result[1:])

        with mock.patch.object(GRPOTrainer, _FORWARD, exchanged):
            yield

    def step(self, parts: int) -> Any:
        """Go through an optimizer step of the batch cut into ``parts`` micro-batches; return its record."""
        trainer = self.trainer
        trainer.llds.options = replace(trainer.llds.options, coef=self.coef)
        pieces = _cut(self.inputs, parts)
        for index, piece in enumerate(pieces):
            _begin_step(trainer, pieces, index)
            with self._exchanged(None):
                trainer.compute_loss(trainer.model, piece)
        return trainer.llds.last_step


def _begin_step(trainer: Any, batches: list[dict[str, Any]], index: int = 0) -> None:
    """Make the trainer believe that ``batches`` are an optimizer step, and that ``index`` of them are done."""
    trainer._buffered_inputs = batches
    trainer._step = index
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.accelerator.gradient_state._set_sync_gradients(index == len(batches) - 1)


def _cut(inputs: dict[str, Any], parts: int) -> list[dict[str, Any]]:
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


def _metrics_report(loss: _ProbedLoss) -> Report:
    """Cut the batch in two: the record of the step must speak of both halves."""
    if loss.inputs["completion_ids"].shape[0] < 2:
        return Report(unchecked=(("L10", "the batch has one response only"),))
    record = loss.step(parts=2)
    told = min(record.metrics.get("llds/tokens", 0.0), record.sums["tokens"])
    whole = float(response_mask(loss.inputs).sum()) * loss.trainer.accelerator.num_processes
    if loss.trainer.accelerator.num_processes > 1 or abs(told - whole) <= 0.5 or told == 0 == whole:
        return Report(checked=("L10",))
    finding = Finding(
        "L10",
        "certain",
        f"an optimizer step of two micro-batches has {whole:.0f} policy tokens, and its metrics speak of "
        f"{told:.0f}",
        "the metrics",
        "add sums and counts over all micro-batches, and divide once",
    )
    return Report((finding,), ("L10",))


def _zero_report(loss: _ProbedLoss) -> Report:
    """Right after sampling the penalty is zero by construction, and the record must say so."""
    trainer = loss.trainer
    is_fresh = int(loss.inputs.get(rollout.ROLLOUT_STEP, -1)) == trainer.state.global_step
    if trainer.llds.options.baseline != "old" or not is_fresh:
        return Report(unchecked=(("L14", "this batch may be penalised, so no zero can be shown"),))
    trainer._metrics["train"].clear()
    record = loss.step(parts=1)
    logged = trainer._metrics["train"].get(STRUCTURAL_METRIC, [])
    if record.verdict == "structural zero" and logged and logged[-1] == 1:
        return Report(checked=("L14",))
    finding = Finding(
        "L14",
        "certain",
        f"old and new policy are the same here, but the step is told as {record.verdict!r} and "
        f"{STRUCTURAL_METRIC} as {logged[-1] if logged else 'nothing'}",
        "the metrics",
        f"log {STRUCTURAL_METRIC} beside the loss",
    )
    return Report((finding,), ("L14",))


# --- as if nothing had happened

#: What the probe moves in a trainer.
_TRAINER_STATE = (
    "_buffered_inputs",
    "_step",
    "current_gradient_accumulation_steps",
    "_current_train_step_time",
)


@contextmanager
def undisturbed(trainer: Any) -> Iterator[None]:
    """Put the trainer back to what it was: random numbers, counters, metrics, gradients, and what LLDS keeps."""
    absent = object()
    kept = {name: getattr(trainer, name, absent) for name in _TRAINER_STATE}
    tokens_seen = trainer.state.num_input_tokens_seen
    gradients = [(p, p.grad) for p in trainer.model.parameters()]
    training, sync = trainer.model.training, trainer.accelerator.sync_gradients
    restore = [_without(trainer, "_metrics", {mode: defaultdict(list) for mode in ("train", "eval")})]
    restore.append(_without(trainer, "_logs", copy.deepcopy(getattr(trainer, "_logs", None))))
    restore.append(_without(trainer, "_pending_metrics", defaultdict(list)))
    runtime = trainer.llds
    restore += [_without(runtime, "step_hooks", []), _without(runtime, "observers", [])]
    restore += [_without(runtime, "last_step", None), _without(runtime, "verdicts", Counter())]
    restore += [_without(runtime, "options", replace(runtime.options, warmup_steps=0, baseline="old"))]
    trainer.model.train()
    try:
        with _random_kept():
            yield
    finally:
        for undo in reversed(restore):
            undo()
        for name, value in kept.items():
            if value is not absent:
                setattr(trainer, name, value)
            elif hasattr(trainer, name):
                delattr(trainer, name)
        trainer.state.num_input_tokens_seen = tokens_seen
        for parameter, gradient in gradients:
            parameter.grad = gradient
        trainer.model.train(training)
        trainer.accelerator.gradient_state._set_sync_gradients(sync)
        runtime.reset_step()


def _without(owner: Any, name: str, stand_in: Any) -> Callable[[], None]:
    """Put ``stand_in`` in place of an attribute; return what puts the attribute back."""
    had = getattr(owner, name, None)
    setattr(owner, name, stand_in)
    return lambda: setattr(owner, name, had)


@contextmanager
def _random_kept() -> Iterator[None]:
    import numpy as np

    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
