"""One optimizer step: the losses of :mod:`llds.objective` put together as an arm says, and what it did.

The same arrays and functions as in the trainers that use LLDS for real; a test holds value and gradient
against TRL's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llds.lab.arms import Arm
from llds.objective import LLDSOutput, grpo_policy_loss, gspo_policy_loss, k3_kl, llds_loss

#: Upper bound of one token's KL estimate in nats, as in verl, which the paper used.
KL_CLAMP = 10.0
#: Advantages no further from 0 than this count as 0, as in :func:`llds.llds_loss`.
SIGN_BAND = 1e-3
_AGGREGATION = {"grpo": "token-mean", "gspo": "sequence-mean"}


@dataclass(frozen=True)
class Batch:
    """Responses to learn from: B rows, T tokens.

    ``ids`` [B, P + T]; ``mask``, ``answer_mask`` [B, T]; ``advantages`` [B]; ``credit`` [B, T]: 1 where a
    token takes part in the policy loss; ``old_logprobs``, ``ref_logprobs`` [B, T]; ``first_search`` [B] as in
    :func:`llds.dynamics.compare_first_searches`; ``answer_weight``: w of Eq. 5, 0-dim.
    """

    ids: Tensor
    mask: Tensor
    answer_mask: Tensor
    advantages: Tensor
    credit: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    first_search: Tensor
    answer_weight: Tensor

    def rows(self, chosen: Tensor) -> Batch:
        """Return the ``chosen`` rows, cut after the last token that the policy wrote in them."""
        mask = self.mask[chosen]
        length = int(mask.any(0).nonzero().max()) + 1
        prompt = self.ids.shape[1] - self.mask.shape[1]
        wide = {name: getattr(self, name)[chosen, :length] for name in _PER_TOKEN}
        return replace(
            self,
            ids=self.ids[chosen, : prompt + length],
            advantages=self.advantages[chosen],
            first_search=self.first_search[chosen],
            **wide,
        )


_PER_TOKEN = ("mask", "answer_mask", "credit", "old_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class Losses:
    """``total`` is minimised: policy + kl coefficient · KL + λ · LLDS − entropy coefficient · entropy."""

    total: Tensor
    policy: LLDSOutput
    kl: LLDSOutput
    llds: LLDSOutput


def losses(
    arm: Arm,
    batch: Batch,
    logprobs: Tensor,
    entropies: Tensor,
    *,
    coef: float | None = None,
    held_logprobs: Tensor | None = None,
) -> Losses:
    """Put together what ``arm`` minimises on ``batch``, from ``logprobs`` and ``entropies`` [B, T].

    ``coef``: λ now, the arm's if None. ``held_logprobs``: those of the anchor, the old ones if None.
    ``entropies`` need a gradient only for an arm with an entropy bonus.
    """
    coef = arm.coef if coef is None else coef
    old = batch.old_logprobs
    common = (logprobs, old, batch.advantages.unsqueeze(1) * batch.credit, batch.mask)
    is_gspo = arm.policy == "gspo"
    policy = gspo_policy_loss(*common) if is_gspo else grpo_policy_loss(*common, clip_high=arm.clip_high)
    kl = _kl_term(arm, batch, logprobs)
    has_ma = arm.answer_searches is not None
    llds = llds_loss(
        logprobs,
        old if held_logprobs is None else held_logprobs,
        batch.advantages,
        batch.mask,
        coef=coef,
        gate=arm.gate,
        normalizer=arm.normalizer,
        preserve=arm.preserve,
        dead_zone=arm.dead_zone,
        penalty=arm.penalty,
        huber_width=arm.huber_width,
        answer_mask=batch.answer_mask if has_ma else None,
        answer_weight=batch.answer_weight if has_ma else 1.0,
    )
    total = policy.loss + arm.kl * kl.loss
    if coef:
        total = total + llds.loss
    if arm.entropy:
        total = total - arm.entropy * (entropies * batch.mask).sum() / batch.mask.sum()
    return Losses(total, policy, kl, llds)


def _kl_term(arm: Arm, batch: Batch, logprobs: Tensor) -> LLDSOutput:
    """Return the KL term, averaged as the policy's loss is, as in verl and TRL."""
    ref = batch.ref_logprobs
    if arm.kl_on != "all":
        is_wrong = batch.advantages < -SIGN_BAND
        is_on = is_wrong if arm.kl_on == "wrong" else ~is_wrong
        # Where the term is off the reference is the policy itself: value and gradient are 0 there, and the
        # average stays over all tokens.
        ref = torch.where(is_on.unsqueeze(1), ref, logprobs.detach())
    return k3_kl(logprobs, ref, batch.mask, clamp=KL_CLAMP, aggregation=_AGGREGATION[arm.policy])


def shared_prefix(ids: Tensor, rewards: Tensor, group_size: int) -> Tensor:
    """Mark the tokens with which a wrong response begins just like a right one of its group: bool [B, T].

    ``ids`` [B, T] of responses, ``rewards`` [B]; a right response is one with the best reward of a group in
    which rewards differ.
    """
    groups = ids.view(-1, group_size, ids.shape[1])
    reward = rewards.view(-1, group_size)
    best = reward.amax(1, keepdim=True)
    is_right = (reward == best) & (reward.amin(1, keepdim=True) < best)
    same = (groups.unsqueeze(2) == groups.unsqueeze(1)).long().cumprod(-1).bool()
    shared = (same & is_right[:, None, :, None]).any(2)
    return (shared & ~is_right.unsqueeze(-1)).view_as(ids)
