"""What can be told from a configuration alone. One function per fault; each returns what it found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from llds.objective.normalizers import NORMALIZERS
from llds.preflight.findings import Finding, Report, merge
from llds.preflight.setup import Setup

#: λ values that were published for the normaliser "all".
_PUBLISHED = (0.1, 0.2, 0.3)
#: Above this a KL to the reference holds likelihood much as the penalty does.
_STRONG_KL = 0.02
_SMALL_GROUP = 4
#: Estimators with an advantage of its own for every token.
_PER_TOKEN = ("gae", "reinforce_plus_plus")


def check_setup(setup: Setup) -> Report:
    """Look for every fault that a configuration shows; without λ nothing but what concerns GRPO itself."""
    return merge(_run(setup, fault, check) for fault, check in CHECKS.items())


def _run(setup: Setup, fault: str, check: Callable[[Setup], Iterator[Finding | str]]) -> Report:
    found = list(check(setup))
    missing = [one for one in found if isinstance(one, str)]
    findings = tuple(one for one in found if isinstance(one, Finding))
    if missing and not findings:
        return Report(unchecked=((fault, missing[0]),))
    return Report(findings=findings, checked=(fault,))


def _old_is_new(setup: Setup) -> Iterator[Finding | str]:
    if setup.baseline is None or setup.steps_per_rollout is None:
        yield "the configuration does not say how many optimizer steps a rollout gets"
    elif setup.coef and setup.baseline == "old" and _is_used_up_at_once(setup.steps_per_rollout):
        yield Finding(
            "L1",
            "certain",
            f"each rollout gets {setup.steps_per_rollout} optimizer step(s), and displacement is measured from "
            "the policy that sampled: STRUCTURAL ZERO in every step",
            setup.name("steps_per_rollout"),
            setup.live_advice or "take two or more optimizer steps per rollout, or another baseline",
        )


def _is_used_up_at_once(steps_per_rollout: Fraction) -> bool:
    """Say whether each optimizer step is made of whole rollouts; one that cuts a rollout finds old ones."""
    return (1 / steps_per_rollout).denominator == 1


def _wrong_old(setup: Setup) -> Iterator[Finding | str]:
    if setup.old_from_inference is None:
        yield "the configuration does not say where the old log-probs come from"
    elif setup.coef and setup.old_from_inference:
        yield Finding(
            "L3",
            "likely",
            "old log-probs are those of the inference engine; its rounding and kernels move every token, and any "
            "drop opens a gate",
            setup.name("old_from_inference"),
            "let the trainer recompute old log-probs, or set a dead zone above the noise floor",
        )


def _mask(setup: Setup) -> Iterator[Finding | str]:
    if setup.masks_feedback is None or setup.is_multi_turn is None:
        yield "the configuration does not say what is masked"
    elif setup.is_multi_turn and not setup.masks_feedback:
        yield Finding(
            "L4",
            "certain",
            "there are tools, and what they write is not masked: it would be trained on, and penalised",
            setup.name("masks_feedback"),
            "mask feedback tokens out of the loss",
        )


def _advantages(setup: Setup) -> Iterator[Finding | str]:
    if setup.preserve is None:
        yield "the configuration does not say which responses are preserved"
    elif setup.coef and setup.preserve == "positive":
        yield Finding(
            "L5",
            "info",
            "only responses with A > 0 are preserved; the paper keeps those with A = 0 too, since a response that "
            "is not trained must not lose likelihood either",
            setup.name("preserve"),
            'set it to "nonnegative", unless this is an ablation',
        )
    yield from _estimator(setup)
    if setup.coef and (setup.advantage_tol or 0) >= _smallest_advantage(setup):
        yield Finding(
            "L5",
            "likely",
            f"an advantage down to -{setup.advantage_tol:g} counts as 0, and with one good response among "
            f"{setup.group_size or 'many'} the others have -{_smallest_advantage(setup):.3g}: wrong responses are "
            "preserved",
            setup.name("advantage_tol"),
            "set it to 1e-3, which is above the rounding of equal rewards",
        )


def _smallest_advantage(setup: Setup) -> float:
    """Return the size of a wrong response's advantage where one in its group is right and rewards are 0 or 1."""
    return 1 / math.sqrt(setup.group_size or 25)


def _estimator(setup: Setup) -> Iterator[Finding | str]:
    """L5 too: what the sign of an advantage says depends on how it is made."""
    if setup.coef and setup.advantages in _PER_TOKEN:
        yield Finding(
            "L5",
            "likely",
            f"advantages are those of {setup.advantages!r}: they differ from token to token, so their sign does not "
            "tell a good response from a bad one",
            setup.name("advantages"),
            'set it to "grpo", or another estimator that compares the responses to one question',
        )


def _filled(setup: Setup) -> Iterator[Finding | str]:
    if setup.old_from_inference is None:
        yield "the configuration does not say where the old log-probs come from"
    elif not setup.old_from_inference or setup.has_inference_logprobs is None:
        yield "only a batch shows whether log-probs are missing"
    elif setup.coef and not setup.has_inference_logprobs:
        yield Finding(
            "L11",
            "certain",
            "old log-probs are to be those of the inference engine, which is not told to return any",
            setup.name("has_inference_logprobs"),
            "set it to True, or let the trainer recompute old log-probs",
        )


def _gate(setup: Setup) -> Iterator[Finding | str]:
    if setup.gate is None:
        yield "the configuration does not name a gate"
    elif setup.coef and setup.gate == "response" and setup.is_multi_turn:
        yield Finding(
            "L6",
            "info",
            "the gate looks at whole responses: an action that lost is left alone when another gained more",
            setup.name("gate"),
            'set it to "action", which did better in the paper, unless this is an ablation',
        )


def _normalizer(setup: Setup) -> Iterator[Finding | str]:
    if setup.normalizer is None or setup.coef is None:
        yield "the configuration does not name a normaliser"
        return
    where = f"{setup.name('coef')}, {setup.name('normalizer')}"
    if setup.normalizer != "all" and setup.coef in _PUBLISHED:
        yield Finding(
            "L7",
            "likely",
            f"λ = {setup.coef:g} was published for N = all action tokens, but N is {setup.normalizer!r} here, where "
            "the same λ weighs several times as much",
            where,
            'set the normaliser to "all", or convert λ with llds.objective.convert_coef',
        )
    elif setup.coef > 5:
        yield Finding(
            "L7",
            "likely",
            f"λ = {setup.coef:g} is far above anything that was published (0.01 to 0.3)",
            where,
            f"start from 0.2 with the normaliser 'all' (there are {', '.join(NORMALIZERS)})",
        )


def _answers(setup: Setup) -> Iterator[Finding | str]:
    if setup.has_answer_mask is None:
        yield "the configuration does not say whether rollouts tell the answer span"
    elif setup.coef and setup.answer_weight is not None and not setup.has_answer_mask:
        yield Finding(
            "L8",
            "certain",
            f"answer_weight = {setup.answer_weight} needs the answer span, which these rollouts do not tell",
            setup.name("answer_weight"),
            "return answer_mask from the rollout, or unset the answer weight",
        )


def _never_called(setup: Setup) -> Iterator[Finding | str]:
    if setup.is_attached is None:
        yield "a configuration alone does not show whether anything calls the penalty"
    elif setup.coef and not setup.is_attached:
        yield Finding(
            "L9",
            "certain",
            "LLDS has settings, but nothing in this configuration adds it to the loss",
            setup.name("is_attached"),
            setup.names.get("attach_advice", "attach it to the trainer"),
        )


def _last_micro_batch(setup: Setup) -> Iterator[Finding | str]:
    if setup.logging_steps is None:
        yield "the configuration does not say how often metrics are logged"
    elif setup.coef and setup.logging_steps > 1:
        yield Finding(
            "L10",
            "info",
            f"one log entry in {setup.logging_steps} optimizer steps: ratios are averaged plainly over steps in "
            "which LLDS can and can't act, and an alarm comes later",
            setup.name("logging_steps"),
            "set it to 1",
        )


def _twice(setup: Setup) -> Iterator[Finding | str]:
    if setup.kl_in_loss is None and setup.kl_in_reward is None:
        yield "the configuration does not say whether there is a KL term"
        return
    in_loss, in_reward = setup.kl_in_loss or 0.0, setup.kl_in_reward or 0.0
    if setup.times > 1:
        yield Finding(
            "L12",
            "certain",
            f"the penalty would be added {setup.times} times",
            setup.name("is_attached"),
            "attach it once",
        )
    if in_loss > 0 and in_reward > 0:
        yield Finding(
            "L12",
            "likely",
            f"the KL to the reference stands in the loss ({in_loss:g}) and in the reward ({in_reward:g})",
            f"{setup.name('kl_in_loss')}, {setup.name('kl_in_reward')}",
            "keep one of them",
        )
    if setup.coef and setup.baseline == "reference" and in_loss >= _STRONG_KL:
        yield Finding(
            "L12",
            "likely",
            f"penalty and KL ({in_loss:g}) both pull towards the reference policy",
            f"{setup.name('baseline')}, {setup.name('kl_in_loss')}",
            'take the baseline "old" or "anchor", or lower the KL',
        )


def _groups(setup: Setup) -> Iterator[Finding | str]:
    if setup.group_size is None:
        yield "the configuration does not say how many responses a question gets"
    elif setup.group_size < _SMALL_GROUP:
        yield Finding(
            "L13",
            "certain" if setup.group_size < 2 else "likely",
            f"{setup.group_size} response(s) per question: the sign of A = r - mean says little about a response",
            setup.name("group_size"),
            "sample 4 or more responses per question; the paper has 5",
        )


#: Fault -> what looks for it. L2 and L14 can't be seen in a configuration.
CHECKS: dict[str, Callable[[Setup], Iterator[Finding | str]]] = {
    "L1": _old_is_new,
    "L3": _wrong_old,
    "L4": _mask,
    "L5": _advantages,
    "L6": _gate,
    "L7": _normalizer,
    "L8": _answers,
    "L9": _never_called,
    "L10": _last_micro_batch,
    "L11": _filled,
    "L12": _twice,
    "L13": _groups,
}
