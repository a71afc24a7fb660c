"""Asks a real loss on a real batch what it does, and compares the answers with the equations.

A *term* is the penalty of one optimizer batch as the training code computes it, λ included: a function of the
new log-probs and of the advantages. It is called with log-probs made to fall, to rise, and to stay; its
gradient says which tokens are penalised and how much (Eq. 4: −λ · gate · w / N on a token that fell).
Every call is made whatever the earlier ones said, so processes that share a batch stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llds.objective import NORMALIZERS, llds_loss, normalizer_count
from llds.preflight.findings import Finding, Report, merge

Term = Callable[[Tensor, Tensor], Tensor]
#: Advantages that rows get in turn, so that every row is once correct, once neutral and once wrong.
_SIGNS = (1.0, 0.0, -1.0)
_DROP = 0.3
_RELATIVE = 0.02


@dataclass(frozen=True)
class Intent:
    """What the penalty is meant to be; names and defaults of :func:`llds.llds_loss`."""

    coef: float = 0.2
    gate: str = "action"
    normalizer: str = "all"
    preserve: str = "nonnegative"
    advantage_tol: float = 1e-3
    dead_zone: float = 0.0
    huber_width: float = 0.0
    answer_weight: float = 1.0

    @property
    def drop(self) -> float:
        """By how many nats the probe lets a token fall."""
        return _DROP * self.scale

    @property
    def scale(self) -> float:
        """How large moves must be for dead zone and Huber width not to matter, in units of those below."""
        return max(1.0, 10 * self.dead_zone / _DROP, 4 * self.huber_width / _DROP)


@dataclass(frozen=True)
class ProbeBatch:
    """One batch as the loss gets it; tensors [B, T], log-probs in nats.

    ``baseline``: log-probs that displacement is measured from. ``response_mask``: as the loss uses it.
    ``attention``: 1 on every token that is no padding. ``current``: log-probs of the policy, computed anew.
    ``is_fresh``: the policy has not changed since it sampled, so ``baseline`` and ``current`` should agree.
    ``reference``, ``inference``: log-probs of the reference policy and of the inference engine.
    ``answer_mask``: the answer span as the loss gets it. ``feedback``: 1 on tokens known to be a tool's.
    ``written``: 1 on the tokens that the policy wrote, where the rollout itself says so.
    ``rounding``: nats per token by which two computations of the same log-probs may differ on average.
    ``advantages`` [B]: the real ones. ``texts``: each token of each row as text.
    """

    baseline: Tensor
    response_mask: Tensor
    attention: Tensor | None = None
    current: Tensor | None = None
    is_fresh: bool = False
    reference: Tensor | None = None
    inference: Tensor | None = None
    answer_mask: Tensor | None = None
    feedback: Tensor | None = None
    written: Tensor | None = None
    rounding: float = 5e-3
    advantages: Tensor | None = None
    texts: Sequence[Sequence[str]] | None = None

    @property
    def mask(self) -> Tensor:
        """The response mask as bool."""
        return self.response_mask.bool()


def probe_term(
    term: Term,
    batch: ProbeBatch,
    intent: Intent,
    reaches_model: Callable[[Tensor, Tensor], float] | None = None,
    whole_count: Callable[[float], float] = float,
) -> Report:
    """Look for the faults that a loss shows on a batch.

    Args:
        term: see above; differentiable in its first argument [B, T]; the second is [B].
        batch: real responses.
        intent: what the penalty is meant to be.
        reaches_model: given log-probs and advantages, returns the norm of the gradient that the term has in the
            policy's parameters.
        whole_count: given what N counts in this batch, returns the N by which this process's loss is to be
            divided; for data parallel training, where N is that of all processes.
    """
    answers = _Answers(term, batch, intent, whole_count)
    reach = None if reaches_model is None else reaches_model(answers.fallen, answers.signs[0])
    reports = [check_arrays(batch, intent)]
    if not batch.mask.any():
        return merge(reports)
    if answers.is_silent:
        return merge([*reports, _silent()])
    reports.append(_gradient(answers, reach, reaches_model is not None))
    if answers.has_gradient:
        reports += [_tokens(answers), _signs(answers)]
        # With another mask the actions and the count are others too.
        reports += [_unclear()] if reports[-2].certain else [_weight(answers), _gates(answers)]
    reports.append(_at_rest(answers))
    return merge(reports)


class _Answers:
    """What the term said: its value and gradient per question put to it."""

    def __init__(
        self, term: Term, batch: ProbeBatch, intent: Intent, whole_count: Callable[[float], float]
    ) -> None:
        self.batch, self.intent, self.whole_count = batch, intent, whole_count
        rows = torch.arange(batch.baseline.shape[0], device=batch.baseline.device)
        signs = torch.tensor(_SIGNS, device=batch.baseline.device)
        self.signs = [signs[(rows + turn) % 3] for turn in range(3)]
        self.fallen = batch.baseline - intent.drop
        # Less than this is what rounding leaves of the rest of the loss.
        self.dust = 1e-4 * intent.coef / max(1, int(batch.mask.sum()))
        asked = [_ask(term, self.fallen, advantages, self.dust) for advantages in self.signs]
        self.values = [value for value, _ in asked]
        self.gradients = [gradient for _, gradient in asked]
        everywhere = torch.ones_like(self.signs[0])
        self.patterns = [make(batch, intent) for make in (_first_rises, _last_rises)]
        self.gate_gradients = [
            _ask(term, batch.baseline + pattern, everywhere, self.dust)[1] for pattern in self.patterns
        ]
        self.at_rest, _ = _ask(term, batch.baseline.clone(), everywhere, self.dust)

    @property
    def is_silent(self) -> bool:
        """Whether the term never said anything."""
        least = 1e-4 * self.intent.coef * self.intent.drop
        return all(abs(value) < least for value in self.values) and not self.has_gradient

    @property
    def has_gradient(self) -> bool:
        """Whether the term has a gradient in the log-probs at all."""
        return any(bool(gradient.any()) for gradient in self.gradients)

    def by_sign(self, sign: float) -> Tensor:
        """Return the gradient [B, T] of each row in the turn in which it had an advantage of ``sign``."""
        chosen = [(signs == sign).unsqueeze(1) for signs in self.signs]
        return sum(
            (torch.where(row, g, 0) for row, g in zip(chosen, self.gradients, strict=True)), torch.zeros(())
        )


def _ask(term: Term, logprobs: Tensor, advantages: Tensor, dust: float) -> tuple[float, Tensor]:
    leaf = logprobs.detach().clone().requires_grad_()
    value = term(leaf, advantages)
    told = float(value.detach())
    if not value.requires_grad:
        return told, torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return told, torch.zeros_like(leaf) if gradient is None else _without_dust(gradient, dust)


def _without_dust(gradient: Tensor, dust: float) -> Tensor:
    """Set to 0 what is only the rounding of a difference of two losses."""
    least = (1e-4 * gradient.abs().max()).clamp(min=dust)
    return gradient.masked_fill(gradient.abs() < least, 0)


# --- the arrays themselves


def check_arrays(batch: ProbeBatch, intent: Intent) -> Report:
    """Look at the arrays of a batch without calling a loss."""
    reports = [_mask_report(batch), _old_report(batch), _zeros_report(batch), _answer_report(batch, intent)]
    if batch.texts is not None:
        reports.append(Report(notes=(spans_text(batch),)))
    if batch.advantages is not None and bool((batch.advantages.abs() <= intent.advantage_tol).all()):
        reports.append(
            Report(
                (
                    Finding(
                        "L13",
                        "info",
                        "every response of this batch has A = 0: all rewards of a group are equal",
                        "rewards and group size",
                        "nothing is learnt from such a batch; look whether that is rare",
                    ),
                ),
                ("L13",),
            )
        )
    return merge(reports)


def _mask_report(batch: ProbeBatch) -> Report:
    found = []
    raw = batch.response_mask
    if bool(((raw != 0) & (raw != 1)).any()):
        odd = sorted({float(value) for value in raw.flatten().tolist()} - {0.0, 1.0})[:3]
        found.append(_certain_mask(f"it holds {odd}, not only 0 and 1", "turn -100 and other marks into 0"))
    if not bool(batch.mask.any()):
        found.append(
            _certain_mask("it has no policy token at all", "put 1 on the tokens that the policy wrote")
        )
    if batch.attention is not None and (padding := int((batch.mask & ~batch.attention.bool()).sum())):
        found.append(
            _certain_mask(f"{padding} padding tokens are in it", "multiply it by the attention mask")
        )
    if batch.feedback is not None:
        shown = batch.mask & batch.feedback.bool()
        if wrong := int(shown.sum()):
            example = _example(batch, shown)
            found.append(
                _certain_mask(
                    f"{wrong} tokens that a tool wrote are in it{example}", "put 0 on what tools returned"
                )
            )
    found += _unlike_rollout(batch)
    empty = int((~batch.mask.any(1)).sum())
    if empty and bool(batch.mask.any()):
        found.append(
            Finding(
                "L4",
                "info",
                f"{empty} of {len(raw)} responses have no policy token",
                "the response mask",
                "see whether they should",
            )
        )
    return Report(tuple(found), ("L4",))


def _unlike_rollout(batch: ProbeBatch) -> list[Finding]:
    """Compare the mask with what the rollout says; a response may be left out as a whole."""
    if batch.written is None:
        return []
    written, found = batch.written.bool(), []
    extra, lost = batch.mask & ~written, written & ~batch.mask & batch.mask.any(1, keepdim=True)
    if batch.attention is not None:
        extra = extra & batch.attention.bool()
    if count := int(extra.sum()):
        evidence = f"{count} tokens are in it that the policy did not write, as the rollout says"
        found.append(
            _certain_mask(evidence + _example(batch, extra), "multiply it by the rollout's own mask")
        )
    if count := int(lost.sum()):
        evidence = f"{count} tokens are not in it that the policy wrote, as the rollout says"
        found.append(
            _certain_mask(evidence + _example(batch, lost), "keep every token that the policy wrote")
        )
    return found


def _certain_mask(evidence: str, change: str) -> Finding:
    return Finding("L4", "certain", evidence, "the response mask", change)


def _old_report(batch: ProbeBatch) -> Report:
    if batch.current is None or not batch.is_fresh:
        return Report(unchecked=(("L3", "no log-probs of the policy that sampled could be computed anew"),))
    distance = _distance(batch.baseline, batch.current, batch.mask)
    if distance < batch.rounding or _filled(batch).any():
        return Report(checked=("L3",))
    others = {"the reference policy": batch.reference, "the inference engine": batch.inference}
    same = [
        name
        for name, other in others.items()
        if other is not None and _distance(batch.baseline, other, batch.mask) < 0.05 * distance
    ]
    whose = f"; they are those of {same[0]}" if same else ""
    finding = Finding(
        "L3",
        "certain" if same or distance > 20 * batch.rounding else "likely",
        f"right after sampling, old log-probs differ from the policy's own by {distance:.3g} nats a token on "
        f"average{whose}",
        "old log-probs",
        "pass those that the trainer computes with the weights that sampled; dropout must be off",
    )
    return Report((finding,), ("L3",))


def _distance(one: Tensor, other: Tensor, mask: Tensor) -> float:
    return float((one - other).abs()[mask].double().mean()) if bool(mask.any()) else 0.0


def _filled(batch: ProbeBatch) -> Tensor:
    """Say which policy tokens have an old log-prob of exactly 0 where the policy is not that sure."""
    filled = batch.mask & (batch.baseline == 0)
    return filled if batch.current is None else filled & (batch.current < -1e-3)


def _zeros_report(batch: ProbeBatch) -> Report:
    filled = _filled(batch)
    share = float(filled.sum()) / max(1, int(batch.mask.sum()))
    if share <= 0.01:
        return Report(checked=("L11",))
    certain = batch.current is not None
    finding = Finding(
        "L11",
        "certain" if certain else "likely",
        f"{share:.0%} of the policy's tokens have an old log-prob of exactly 0, which reads as probability 1"
        + (", where the policy is less sure" if certain else "")
        + _example(batch, filled),
        "old log-probs",
        "leave tokens without a log-prob out of the mask, or compute it",
    )
    return Report((finding,), ("L11",))


def _answer_report(batch: ProbeBatch, intent: Intent) -> Report:
    if intent.answer_weight == 1.0:
        return Report(checked=("L8",))
    answer = None if batch.answer_mask is None else batch.answer_mask.bool() & batch.mask
    evidence = ""
    if answer is None or not bool(answer.any()):
        evidence = "answers have a weight of their own, but no token of this batch is in the answer mask"
    else:
        first, last = _first_and_last_tokens(batch.mask)
        several = first != last
        has_first = answer.gather(1, first.unsqueeze(1)).squeeze(1) & several
        behind = (~answer & batch.mask).long().flip(1).argmax(1)
        starts = int(has_first.sum())
        inverted = int((has_first & (behind < answer.shape[1] - 1 - first)).sum())
        if starts and inverted > 0.5 * int(several.sum()):
            evidence = (
                f"the answer mask holds the first token that the policy wrote in {starts} of "
                f"{int(several.sum())} responses, and leaves out later ones: it looks inverted"
            )
    if not evidence:
        return Report(checked=("L8",))
    finding = Finding(
        "L8",
        "certain",
        evidence,
        "answer_mask",
        "put 1 on the tokens of the final answer and 0 elsewhere (the authors' code has it the other way)",
    )
    return Report((finding,), ("L8",))


def _first_and_last_tokens(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last column with a one, [B] each; 0 where there is none."""
    first = mask.long().argmax(1)
    last = mask.shape[1] - 1 - mask.long().flip(1).argmax(1)
    return first, torch.where(mask.any(1), last, 0)


# --- the loss


def _silent() -> Report:
    finding = Finding(
        "L9",
        "certain",
        "the loss is the same with and without λ, though every token was made to fall",
        "the loss function",
        "call the penalty where the loss is computed, and add its .loss",
    )
    return Report((finding,), ("L9",))


def _unclear() -> Report:
    why = "the penalty gets another mask than the batch has: mend that first"
    return Report(unchecked=tuple((fault, why) for fault in ("L6", "L7", "L8", "L12")))


def _gradient(answers: _Answers, reach: float | None, was_asked: bool) -> Report:
    evidence = ""
    if not answers.has_gradient:
        evidence = f"the penalty is {max(answers.values):.3g}, but its gradient in the log-probs is 0"
    elif was_asked and not reach:
        evidence = "the penalty has a gradient in the log-probs, but none in the policy's parameters"
    checked = ("L2", "L9")
    if not evidence:
        return Report(checked=checked)
    change = "compute the penalty from log-probs that carry a gradient: no .detach(), no torch.no_grad()"
    return Report((Finding("L2", "certain", evidence, "the loss function", change),), checked)


def _tokens(answers: _Answers) -> Report:
    """Compare the tokens that are penalised in correct responses with the mask."""
    batch, gradient = answers.batch, answers.by_sign(1.0)
    touched = gradient != 0
    outside, missed = touched & ~batch.mask, ~touched & batch.mask & touched.any(1, keepdim=True)
    found = []
    if count := int(outside.sum()):
        evidence = f"{count} tokens outside the response mask are penalised{_example(batch, outside)}"
        found.append(
            Finding("L4", "certain", evidence, "the mask that the penalty gets", "give it the response mask")
        )
    if (count := int(missed.sum())) and answers.intent.answer_weight != 0:
        evidence = f"{count} tokens of the policy fell and are not penalised{_example(batch, missed)}"
        found.append(
            Finding("L4", "certain", evidence, "the mask that the penalty gets", "give it the response mask")
        )
    return Report(tuple(found), ("L4",))


def _signs(answers: _Answers) -> Report:
    rows = answers.batch.mask.any(1)
    share = {
        sign: float((answers.by_sign(sign) != 0).any(1)[rows].double().mean()) for sign in (1.0, 0.0, -1.0)
    }
    wanted = {1.0: True, 0.0: answers.intent.preserve == "nonnegative", -1.0: False}
    texts = {1.0: "A > 0", 0.0: "A = 0", -1.0: "A < 0"}
    wrong = [
        f"with {texts[sign]} {share[sign]:.0%} are penalised, and {'all' if is_wanted else 'none'} should be"
        for sign, is_wanted in wanted.items()
        if (share[sign] < 0.5) == is_wanted
    ]
    if not wrong:
        return Report(checked=("L5",))
    evidence = "of responses that fell as a whole, " + "; ".join(wrong)
    change = "preserve responses with A >= 0 (A = 0 included, A < 0 not)"
    return Report((Finding("L5", "certain", evidence, "the preserving set", change),), ("L5",))


def _weight(answers: _Answers) -> Report:
    """Compare the size of the gradient with λ · w / N, for all three assignments of advantages."""
    batch, intent = answers.batch, answers.intent
    answer = torch.zeros_like(batch.mask) if batch.answer_mask is None else batch.answer_mask.bool()
    plain, spoken = batch.mask & ~answer, batch.mask & answer
    found = []
    implied = [
        _implied_count(g, plain if bool(plain.any()) else batch.mask, intent.coef) for g in answers.gradients
    ]
    counts = {name: [_count(answers, name, signs) for signs in answers.signs] for name in NORMALIZERS}
    if not _agree(implied, counts[intent.normalizer]):
        found.append(_wrong_weight(implied, counts, intent))
    checked = ["L7", "L12"]
    if intent.answer_weight != 1.0 and bool(spoken.any()) and bool(plain.any()):
        checked.append("L8")
        gradient = answers.by_sign(1.0)
        ratio = _size(gradient, spoken) / max(_size(gradient, plain), 1e-30)
        if abs(ratio - intent.answer_weight) > _RELATIVE * max(1.0, intent.answer_weight):
            evidence = (
                f"answer tokens weigh {ratio:.3g} times the others, not {intent.answer_weight:.3g} times"
            )
            change = "hand answer_mask (1 on the answer) and answer_weight to the penalty"
            found.append(Finding("L8", "certain", evidence, "answer_mask, answer_weight", change))
    return Report(tuple(found), tuple(checked))


def _size(gradient: Tensor, where: Tensor) -> float:
    touched = gradient[where & (gradient != 0)].abs()
    return float(touched.double().median()) if touched.numel() else 0.0


def _implied_count(gradient: Tensor, where: Tensor, coef: float) -> float:
    size = _size(gradient, where)
    return coef / size if size else float("inf")


def _count(answers: _Answers, normalizer: str, advantages: Tensor) -> float:
    batch, intent = answers.batch, answers.intent
    output = llds_loss(
        answers.fallen,
        batch.baseline,
        advantages,
        batch.mask.long(),
        gate=intent.gate,
        preserve=intent.preserve,
        advantage_tol=intent.advantage_tol,
        dead_zone=intent.dead_zone,
    )
    return answers.whole_count(float(normalizer_count(normalizer, output.metrics)))


def _agree(one: Sequence[float], other: Sequence[float], factor: float = 1.0) -> bool:
    return all(
        abs(a * factor - b) <= _RELATIVE * b
        for a, b in zip(one, other, strict=True)
        if b and a != float("inf")
    )


def _wrong_weight(implied: Sequence[float], counts: dict[str, list[float]], intent: Intent) -> Finding:
    wanted = counts[intent.normalizer]
    what = f"each token that fell is weighed λ / {implied[0]:.4g}, and λ / {wanted[0]:.4g} was meant"
    if _agree(implied, wanted, factor=2.0):
        return Finding(
            "L12", "certain", f"{what}: the penalty is there twice", "the loss function", "add it once"
        )
    like = [name for name, count in counts.items() if name != intent.normalizer and _agree(implied, count)]
    named = f": N is that of the normaliser {like[0]!r}" if like else ""
    return Finding(
        "L7",
        "certain",
        f"{what}{named}",
        "normalizer, coef",
        "count N over the whole optimizer batch, or convert λ with llds.objective.convert_coef",
    )


def _at_rest(answers: _Answers) -> Report:
    if answers.at_rest <= 1e-6 * max(1e-3, *(abs(value) for value in answers.values)):
        return Report(checked=("L3",))
    finding = Finding(
        "L3",
        "certain",
        f"the penalty is {answers.at_rest:.3g} where new and old log-probs are the same, so it is measured from "
        "others",
        "old log-probs",
        "measure displacement from the baseline that is meant",
    )
    return Report((finding,), ("L3",))


# --- gates


def _first_rises(batch: ProbeBatch, intent: Intent) -> Tensor:
    """In each response the first action rises as a whole with a token that falls, the last one falls, and the
    response rises.
    """
    return _pattern(batch, intent, first=(-0.5, 1.0), last=(-0.3, 0.1))


def _last_rises(batch: ProbeBatch, intent: Intent) -> Tensor:
    """The other way about: the first action falls, the last one rises with a token that falls, and the response
    falls.
    """
    return _pattern(batch, intent, first=(-2.0, 0.7), last=(-0.4, 0.9))


def _pattern(
    batch: ProbeBatch, intent: Intent, first: tuple[float, float], last: tuple[float, float]
) -> Tensor:
    change = torch.zeros_like(batch.baseline)
    for row, actions in enumerate(_actions(batch.mask)):
        if not _is_telling(actions):
            continue
        for (start, _), moves in ((actions[0], first), (actions[-1], last)):
            change[row, start] = moves[0] * intent.scale
            change[row, start + 1] = moves[1] * intent.scale
    return change


def _is_telling(actions: Sequence[tuple[int, int]]) -> bool:
    return len(actions) > 1 and all(end - start > 1 for start, end in (actions[0], actions[-1]))


def _actions(mask: Tensor) -> list[list[tuple[int, int]]]:
    """Return the runs of ones of each row, as (start, end)."""
    found = []
    for row in mask.long().tolist():
        edges = [0, *row, 0]
        starts = [i for i in range(len(row)) if edges[i + 1] and not edges[i]]
        ends = [i + 1 for i in range(len(row)) if edges[i + 1] and not edges[i + 2]]
        found.append(list(zip(starts, ends, strict=True)))
    return found


def _gates(answers: _Answers) -> Report:
    telling = [row for row, actions in enumerate(_actions(answers.batch.mask)) if _is_telling(actions)]
    if not telling:
        return Report(unchecked=(("L6", "no response of this batch has two actions of two tokens or more"),))
    votes = [gate for gate in ("action", "response", "token") if _behaves(answers, gate, telling)]
    if answers.intent.gate in votes:
        return Report(checked=("L6",))
    like = f"like the gate {votes[0]!r}" if votes else "like no gate of the paper"
    evidence = (
        f"in {len(telling)} responses made to tell, the penalty behaves {like}, not {answers.intent.gate!r}"
    )
    change = "sum displacement over the tokens of one action, and close its gate unless the sum is above 0"
    return Report((Finding("L6", "certain", evidence, "gate", change),), ("L6",))


def _behaves(answers: _Answers, gate: str, rows: Sequence[int]) -> bool:
    """Say whether the penalised tokens are those of ``gate`` for both patterns."""
    batch, intent = answers.batch, answers.intent
    for pattern, gradient in zip(answers.patterns, answers.gate_gradients, strict=True):
        leaf = (batch.baseline + pattern).detach().requires_grad_()
        loss = llds_loss(
            leaf,
            batch.baseline,
            torch.ones(len(leaf), device=leaf.device),
            batch.mask.long(),
            gate=gate,
            dead_zone=intent.dead_zone,
        ).loss
        (expected,) = torch.autograd.grad(loss, leaf)
        spoken = torch.zeros_like(batch.mask)
        if intent.answer_weight == 0 and batch.answer_mask is not None:
            spoken = batch.answer_mask.bool()
        if bool((((expected != 0) != (gradient != 0)) & batch.mask & ~spoken)[list(rows)].any()):
            return False
    return True


# --- for people


def spans_text(batch: ProbeBatch, rows: int = 2) -> str:
    """Return what the mask says of the first rows: which text the policy wrote, and which it did not."""
    assert batch.texts is not None
    lines = ["Tokens of the policy, by the response mask:"]
    for row in range(min(rows, len(batch.texts))):
        length = len(batch.texts[row])
        if batch.attention is not None:
            length = int(batch.attention[row].sum())
        for start, end, wrote in _runs(batch.response_mask[row].bool().tolist()[:length]):
            text = "".join(batch.texts[row][start:end])
            who = "policy  " if wrote else "not     "
            if text:
                lines.append(f"  response {row} [{start:>3}, {end:>3}) {who} {_short(text)!r}")
    return "\n".join(lines)


def _runs(bits: Sequence[bool]) -> list[tuple[int, int, bool]]:
    runs: list[tuple[int, int, bool]] = []
    for index, bit in enumerate(bits):
        if runs and runs[-1][2] == bit:
            runs[-1] = (runs[-1][0], index + 1, bit)
        else:
            runs.append((index, index + 1, bit))
    return runs


def _short(text: str, width: int = 80) -> str:
    return text if len(text) <= width else f"{text[: width // 2]} … {text[-width // 2 :]}"


def _example(batch: ProbeBatch, where: Tensor) -> str:
    """Return the longest run of such tokens as text, to show in a sentence."""
    if batch.texts is None:
        return ""
    row = int(where.sum(1).argmax())
    runs = [(end - start, start, end) for start, end, bit in _runs(where[row].tolist()) if bit]
    _, start, end = max(runs)
    return f", such as {_short(''.join(batch.texts[row][start:end]), 50)!r} in response {row}"
