"""The preflight of a TRL trainer: its configuration, and what its own loss does on one real batch."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from llds.engines.trl import rollout
from llds.engines.trl.checks import STRUCTURAL_METRIC, dropout_warnings, live_advice
from llds.engines.trl.config import LLDSGRPOConfig, LLDSOptions
from llds.engines.trl.counting import response_mask
from llds.engines.trl.rehearsal import OLD, REFERENCE, SAMPLING, OwnRehearsal, Rehearsal, split
from llds.engines.trl.restore import draw_rows, undisturbed
from llds.errors import LLDSError
from llds.objective import llds_loss
from llds.preflight import Finding, Intent, ProbeBatch, Report, Setup, check_setup, merge, probe_term

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


def preflight(trainer: Any, inputs: dict[str, Any] | None = None, **own: Any) -> Report:
    """Look for L1 to L14 in a ``GRPOTrainer`` before ``train()``; see docs/preflight.md.

    ``inputs``: a scored micro-batch as ``compute_loss`` gets it, fresh from a rollout. Without it one rollout
    is made (and the dataset is where it was afterwards). ``own``: what a penalty of your own, in a trainer
    without :mod:`llds.engines.trl`, is meant to be, by the names of :class:`LLDSOptions`: ``coef=0.2``,
    ``gate="action"`` and so on. Collective; call it on every process.

    Raises ``LLDSError`` for ``own`` beside an attached LLDS, and for settings that can't be meant.
    """
    options = _options(trainer, own)
    dropout = [
        Finding("L3", "likely", sentence, "dropout", "switch it off")
        for sentence in dropout_warnings(trainer.model)
    ]
    reports = [check_setup(setup_of(trainer, options)), Report(tuple(dropout), ("L3",))]
    if options is None or options.coef == 0 or not (own or _is_attached(trainer)):
        return merge(reports)
    with undisturbed(trainer):
        reports.append(_probed(trainer, inputs, options if own else None))
    return merge(reports)


def _probed(trainer: Any, inputs: dict[str, Any] | None, own: LLDSOptions | None) -> Report:
    if inputs is not None:
        return probe_trainer(trainer, inputs, own=own)
    with RolloutMasks(trainer) as masks:
        try:
            batch = first_micro_batch(trainer)
        except LLDSError as error:
            # Of the engine's own complaints about a rollout those about answers are a fault of this list.
            if rollout.ANSWER_MASK not in str(error):
                raise
            change = "return the answer mask from the rollout, or unset the answer weight"
            return Report((Finding("L8", "certain", str(error), "llds_answer_weight", change),), ("L8",))
    return probe_trainer(trainer, batch, masks, own=own)


def _options(trainer: Any, own: dict[str, Any]) -> LLDSOptions | None:
    """Return what the penalty is meant to be, None if nothing says that there should be one."""
    if _is_attached(trainer):
        if own:
            raise LLDSError(
                "This trainer has LLDS, which knows its settings; settings are for a penalty of your own."
            )
        options: LLDSOptions = trainer.llds.options
        return options
    if own:
        return LLDSOptions.of(**own)
    return trainer.args.llds_options() if isinstance(trainer.args, LLDSGRPOConfig) else None


def _is_attached(trainer: Any) -> bool:
    return getattr(trainer, "llds", None) is not None


def setup_of(trainer: Any, options: LLDSOptions | None) -> Setup:
    """Return what a trainer's configuration says."""
    needs_attaching = isinstance(trainer.args, LLDSGRPOConfig) or _is_attached(trainer)
    return setup_of_args(
        trainer.args, options, is_attached=_is_attached(trainer) if needs_attaching else None
    )


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


# --- one batch


class RolloutMasks:
    """While entered, notes which tokens the trainer's rollout function says that the policy wrote."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rollout = getattr(trainer, "rollout_func", None)
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}

    def __enter__(self) -> RolloutMasks:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Let the trainer call its rollout function through this."""
        if self._rollout is not None:
            self._trainer.rollout_func = self._noting

    def stop(self) -> None:
        """Let the trainer call its rollout function itself again."""
        if self._rollout is not None:
            self._trainer.rollout_func = self._rollout

    def _noting(self, prompts: Any, trainer: Any) -> Any:
        assert self._rollout is not None
        output = self._rollout(prompts, trainer)
        columns = [output.get(name) for name in ("prompt_ids", "completion_ids", "env_mask")]
        if all(column is not None for column in columns):
            self._known = {
                (tuple(prompt), tuple(completion)): list(mask)
                for prompt, completion, mask in zip(*columns, strict=True)
            }
        return output

    def written(self, inputs: dict[str, Any]) -> Tensor | None:
        """Return 1 where the policy wrote, [B, T]; None where a row of the batch is not known."""
        ids, prompts = inputs["completion_ids"], inputs["prompt_ids"]
        found = torch.zeros_like(ids)
        for row, (prompt, shown) in enumerate(zip(prompts, inputs["prompt_mask"].bool(), strict=True)):
            completion = tuple(ids[row].tolist())
            key = tuple(prompt[shown].tolist())
            masks = [
                mask
                for (one, tokens), mask in self._known.items()
                if one == key and completion[: len(tokens)] == tokens
            ]
            if not masks:
                return None
            # Padding may look like more of a response: the longest that fits is the one.
            mask = max(masks, key=len)
            found[row, : len(mask)] = torch.tensor(mask, device=ids.device)
        return found


def first_micro_batch(trainer: Any) -> dict[str, Any]:
    """Make one rollout and return its first micro-batch, as training would."""
    trainer.model.train()
    trainer._step, trainer._buffered_inputs = 0, None
    found: dict[str, Any] = trainer._prepare_inputs(draw_rows(trainer))
    return found


def probe_trainer(
    trainer: Any,
    inputs: dict[str, Any],
    masks: RolloutMasks | None = None,
    *,
    own: LLDSOptions | None = None,
) -> Report:
    """Probe the loss of a trainer on one scored micro-batch; disturbs the trainer.

    ``masks``: what its rollout function said. ``own``: what a penalty of the trainer's own is meant to be.
    """
    options = own or trainer.llds.options
    try:
        loss = (
            Rehearsal(trainer, inputs, options.coef)
            if own is None
            else OwnRehearsal(trainer, inputs, options.coef, options.advantage_tol)
        )
    except RuntimeError as error:
        if "LLDS was not applied" not in str(error):
            raise
        change = "let compute_loss call super().compute_loss()"
        return Report((Finding("L9", "certain", str(error), "compute_loss", change),), ("L9",))
    if isinstance(loss, OwnRehearsal) and loss.has_passes_of_its_own:
        why = "its loss runs the model beside TRL's forward pass; llds.preflight.probe_term can look at it"
        return Report(unchecked=tuple((f"L{i}", why) for i in (2, 4, 5, 6, 7, 9, 12)))
    batch = _batch_of(trainer, inputs, loss.current, masks)
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
    silent = any(one.fault == "L9" for one in report.findings)
    if isinstance(loss, OwnRehearsal):
        more = [_why_silent(loss, batch)] if silent else [_own_metrics_report(loss, batch)]
        if silent:
            report = Report(tuple(one for one in report.findings if one.fault != "L9"), report.checked)
    else:
        more = [] if silent else [_metrics_report(loss), _zero_report(loss)]
    if not silent:
        more += [_parts_report(loss, batch, intent), _absent_report(loss, batch, intent)]
    return merge([report, *more])


def _batch_of(
    trainer: Any, inputs: dict[str, Any], current: Tensor, masks: RolloutMasks | None
) -> ProbeBatch:
    old = inputs.get(OLD)
    sampled = inputs.get(rollout.ROLLOUT_STEP)
    ids = inputs["completion_ids"]
    decode = trainer.processing_class.decode
    is_rounded = trainer.args.bf16 or trainer.args.fp16 or trainer.model.dtype != torch.float32
    return ProbeBatch(
        baseline=current if old is None else old,
        response_mask=response_mask(inputs),
        attention=inputs["completion_mask"],
        current=current,
        is_fresh=sampled is None or int(sampled) == trainer.state.global_step,
        rounding=5e-2 if is_rounded else 5e-3,
        reference=inputs.get(REFERENCE),
        inference=inputs.get(SAMPLING),
        answer_mask=inputs.get(rollout.ROW_ANSWER_MASK),
        feedback=_feedback(trainer, inputs, current),
        written=None if masks is None else masks.written(inputs),
        advantages=inputs["advantages"] if inputs["advantages"].dim() == 1 else None,
        texts=[[decode([token]) for token in row] for row in ids.tolist()],
    )


def _feedback(trainer: Any, inputs: dict[str, Any], current: Tensor) -> Tensor | None:
    """Return the tokens that a tool wrote as far as they show: by the rollout's log-probs, or by tags."""
    sampled: Tensor | None = inputs.get(SAMPLING)
    if sampled is None:
        return _between_tags(trainer, inputs)
    present = inputs["completion_mask"].bool()
    # A rollout gives feedback 0. So it does a token that the policy was sure of, alone or after the nucleus
    # was cut; but then the policy is no less than likely to write it.
    silent: Tensor = (sampled == 0) & present & (current < -1.0)
    everywhere = (sampled == 0)[present].double().mean() > 0.9
    return torch.zeros_like(silent) if bool(everywhere) else silent


def _between_tags(trainer: Any, inputs: dict[str, Any]) -> Tensor | None:
    """Return what stands between the protocol's tags, unless a policy that imitates it explains it."""
    tokenizer, ids = trainer.processing_class, inputs["completion_ids"]
    tags = [tokenizer.convert_tokens_to_ids(tag) for tag in ("<information>", "</information>")]
    if any(tag is None or tag == tokenizer.unk_token_id or tag == tokenizer.pad_token_id for tag in tags):
        return None
    starts, ends = ids == tags[0], ids == tags[1]
    inside: Tensor = (starts.long().cumsum(1) > ends.long().cumsum(1)) | ends
    inside = inside & inputs["completion_mask"].bool()
    is_masked = (inside & ~response_mask(inputs).bool()).any()
    is_rare = inside.any(1).double().mean() < 0.5
    return torch.zeros_like(inside) if bool(is_masked | is_rare) else inside


def _metrics_report(loss: Rehearsal) -> Report:
    """Cut the batch in two: the record of the step must speak of both halves."""
    if loss.rows < 2:
        return Report(unchecked=(("L10", "the batch has one response only"),))
    loss.step(*split(loss.inputs, loss.current, 2))
    record = loss.trainer.llds.last_step
    told = min(record.metrics.get("llds/tokens", 0.0), record.sums["tokens"])
    whole = float(response_mask(loss.inputs).sum()) * loss.trainer.accelerator.num_processes
    if loss.trainer.accelerator.num_processes > 1 or abs(told - whole) <= 0.5 or told == 0 == whole:
        return Report(checked=("L10",))
    evidence = (
        f"an optimizer step of two micro-batches has {whole:.0f} policy tokens, and its metrics speak of "
        f"{told:.0f}"
    )
    return Report((_last_only(evidence),), ("L10",))


def _last_only(evidence: str) -> Finding:
    change = "add sums and counts over all micro-batches, and divide once"
    return Finding("L10", "certain", evidence, "the metrics", change)


def _parts_report(loss: Rehearsal, batch: ProbeBatch, intent: Intent) -> Report:
    """Cut the batch in two: the penalty must be that of the whole."""
    if loss.rows < 2:
        return Report(unchecked=(("L7", "the batch has one response only"),))
    everywhere = torch.ones(loss.rows, device=batch.baseline.device)
    fallen = batch.baseline - intent.drop
    whole = float(loss.term(fallen.detach().requires_grad_(), everywhere).detach())
    parts = loss.cut_term(fallen, everywhere, 2)
    half = -(-loss.rows // 2)
    if not bool(batch.mask[:half].any() and batch.mask[half:].any()):
        return Report(unchecked=(("L7", "the batch has no two halves with tokens of the policy"),))
    if abs(parts - whole) <= 0.01 * abs(whole):
        return Report(checked=("L7",))
    finding = Finding(
        "L7",
        "certain" if abs(parts - whole) > 0.5 * abs(whole) else "likely",
        f"the penalty is {whole:.4g} in one micro-batch and {parts:.4g} when the same responses come in two, so "
        "N is not that of the optimizer batch and λ depends on the micro-batch size",
        "normalizer",
        "count N over the whole optimizer batch, before its first gradient, and pass it as token_count",
    )
    return Report((finding,), ("L7",))


def _absent_report(loss: Rehearsal, batch: ProbeBatch, intent: Intent) -> Report:
    """Where TRL leaves old log-probs out, old and new are the same and the penalty is 0."""
    if loss.inputs.get(OLD) is not None:
        return Report()
    value = loss.term_as_is(torch.ones(loss.rows, device=batch.baseline.device))
    if abs(value) <= 1e-6:
        return Report(checked=("L11",))
    zeros = torch.zeros_like(loss.current)
    everywhere = torch.ones(loss.rows, device=zeros.device)
    filled = llds_loss(loss.current, zeros, everywhere, batch.mask.long(), coef=intent.coef).loss
    is_filled = abs(value - float(filled)) <= 0.1 * float(filled)
    finding = Finding(
        "L11" if is_filled else "L3",
        "certain",
        f"TRL passes no old log-probs here, for they are the new ones, yet the penalty is {value:.3g}"
        + (", as if they all were 0" if is_filled else ""),
        "old log-probs",
        "where old_per_token_logps is absent, take the new log-probs, detached",
    )
    return Report((finding,), ("L11",))


# --- a penalty of the trainer's own


def _why_silent(loss: OwnRehearsal, batch: ProbeBatch) -> Report:
    """Say why a penalty does not answer: it is measured from others, from itself, or it is not there."""
    everywhere = torch.ones(loss.rows, device=batch.baseline.device)
    for key, whose in ((REFERENCE, "the reference policy"), (SAMPLING, "the inference engine")):
        if loss.inputs.get(key) is None:
            continue
        loss.measured_from = key
        found = float(loss.term((batch.baseline - 0.3).detach().requires_grad_(), everywhere).detach())
        loss.measured_from = OLD
        if abs(found) > 1e-6:
            evidence = f"the penalty answers to the log-probs of {whose}, not to those of the old policy"
            change = f"measure displacement from {OLD}"
            return Report((Finding("L3", "certain", evidence, "old log-probs", change),), ("L3",))
    if loss.operations_of_its_own():
        evidence = (
            "a penalty is computed, and it is 0 however the log-probs fall: it is not measured from "
            f"{OLD}, so old and new are the same by construction: STRUCTURAL ZERO"
        )
        change = f"measure displacement from {OLD}, which TRL computes where the schedule lets them differ"
        return Report((Finding("L1", "certain", evidence, "old log-probs", change),), ("L1",))
    evidence = "the loss is TRL's own, whatever the log-probs: no penalty is computed in it"
    change = "add the penalty in compute_loss, or call attach_llds(trainer, coef=0.2)"
    return Report((Finding("L9", "certain", evidence, "compute_loss", change),), ("L9",))


def _own_metrics_report(loss: OwnRehearsal, batch: ProbeBatch) -> Report:
    """Look which metrics answer when one half of the batch falls, and what stands beside their zeros."""
    if loss.rows < 2:
        return Report(unchecked=(("L10", "the batch has one response only"),))
    neutral = torch.zeros(loss.rows, device=batch.baseline.device)
    half = -(-loss.rows // 2)

    def logged(start: int, end: int) -> dict[str, float]:
        logprobs = batch.baseline.clone()
        logprobs[start:end] -= 0.3
        return loss.step(*split(loss.batch(logprobs, neutral), logprobs, 2))

    still = logged(0, 0)
    first, last = (
        {name for name, value in told.items() if abs(value - still.get(name, 0.0)) > 1e-7}
        for told in (logged(0, half), logged(half, loss.rows))
    )
    if not last:
        return Report(unchecked=(("L10", "no metric answers to the penalty"), ("L14", "none is logged")))
    found = []
    if alone := sorted(last - first):
        evidence = f"of two micro-batches, {', '.join(alone)} answers to the last one only"
        found.append(_last_only(evidence))
    bare = sorted(name for name in last if abs(still.get(name, 0.0)) < 1e-9)
    if bare and not any("structural" in name for name in still):
        found.append(
            Finding(
                "L14",
                "likely",
                f"{', '.join(bare)} is 0 where old and new policy are the same, and nothing that is logged says so",
                "the metrics",
                f"log beside it whether it could have acted, as {STRUCTURAL_METRIC} does",
            )
        )
    return Report(tuple(found), ("L10", "L14"))


def _zero_report(loss: Rehearsal) -> Report:
    """Right after sampling the penalty is zero by construction, and the record must say so."""
    trainer = loss.trainer
    is_fresh = int(loss.inputs.get(rollout.ROLLOUT_STEP, -1)) == trainer.state.global_step
    if trainer.llds.options.baseline != "old" or not is_fresh:
        return Report(unchecked=(("L14", "this batch may be penalised, so no zero can be shown"),))
    logged = loss.step([loss.inputs], [loss.current.clone().requires_grad_()]).get(STRUCTURAL_METRIC)
    record = trainer.llds.last_step
    if record.verdict == "structural zero" and logged == 1:
        return Report(checked=("L14",))
    finding = Finding(
        "L14",
        "certain",
        f"old and new policy are the same here, but the step is told as {record.verdict!r} and "
        f"{STRUCTURAL_METRIC} as {'nothing' if logged is None else logged}",
        "the metrics",
        f"log {STRUCTURAL_METRIC} beside the loss",
    )
    return Report((finding,), ("L14",))
