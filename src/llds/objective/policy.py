"""The losses that LLDS is added to: GRPO and GSPO with clipping, and the k3 estimate of the KL divergence."""

import torch
from torch import Tensor

from llds.errors import LLDSError
from llds.objective import spans
from llds.objective.checks import check_above, check_choice, check_least
from llds.objective.layout import Layout, nan_where
from llds.objective.metrics import LLDSOutput, with_ratios
from llds.objective.normalizers import divide

#: A log-ratio is cut here, as in verl, before exp overflows: infinity times a gradient of 0 would be NaN.
MAX_LOG_RATIO = 20.0


def grpo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    aggregation: str = "token-mean",
    max_response_length: int | None = None,
    token_count: float | Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> LLDSOutput:
    """Return the clipped policy-gradient loss with one probability ratio per token.

    Per token −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) with r = exp(``logprobs`` − ``old_logprobs``).

    Args:
        logprobs: as for :func:`llds.llds_loss`, and so are ``old_logprobs`` (of the policy that sampled),
            ``advantages``, ``response_mask`` and ``segment_ids``.
        old_logprobs: see ``logprobs``.
        advantages: see ``logprobs``.
        response_mask: see ``logprobs``.
        clip_low: how far below 1 a ratio counts.
        clip_high: how far above 1; ``clip_low`` if None. A larger one is clip-higher (DAPO).
        aggregation: "token-mean" divides the sum by the number of policy tokens (DAPO, verl), "sequence-mean"
            is the mean over responses of the mean over a response (GRPO), "dr_grpo" divides the sum by
            responses × ``max_response_length``, so that length has no say. A response without policy tokens
            does not count.
        max_response_length: tokens, a constant of the run; for "dr_grpo" alone.
        token_count: replaces the number of tokens ("token-mean") or of responses (the other two) of this call
            by those of the whole optimizer batch.
        segment_ids: see ``logprobs``.

    Returns:
        The loss, and metrics. Additive: ``policy_sum`` (before it is divided), ``tokens``, ``responses``,
        ``ratio_sum``, ``clipped_tokens`` (whose gradient the clip took), ``clipped_low_tokens``,
        ``clipped_high_tokens``, ``nonfinite_tokens``. A policy token that is not finite makes the loss NaN.

    Raises:
        LLDSError: a shape, a dtype, a name or a number is wrong.
    """
    layout = Layout.of(logprobs, response_mask, segment_ids)
    log_ratio = layout.tokens(logprobs=logprobs) - layout.tokens(old_logprobs=old_logprobs).detach()
    cost, metrics = _clipped(layout, log_ratio, log_ratio, advantages, clip_low, clip_high)
    return _aggregate(cost, layout, metrics, "policy_sum", aggregation, max_response_length, token_count)


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float | None = 4e-4,
    aggregation: str = "sequence-mean",
    max_response_length: int | None = None,
    token_count: float | Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> LLDSOutput:
    """Return the clipped policy-gradient loss with one ratio per response (GSPO, arXiv 2507.18071).

    Arguments, metrics and errors as for :func:`grpo_policy_loss`, but every token has the ratio of its
    response, s = exp(mean over the response of ``logprobs`` − ``old_logprobs``). The clip range is that
    paper's; it is far narrower than GRPO's because s is a geometric mean.
    """
    layout = Layout.of(logprobs, response_mask, segment_ids)
    log_ratio = layout.tokens(logprobs=logprobs) - layout.tokens(old_logprobs=old_logprobs).detach()
    responses = layout.responses
    mean_log_ratio = spans.spread(spans.group_sums(log_ratio, responses), responses) / _lengths(layout)
    cost, metrics = _clipped(layout, log_ratio, mean_log_ratio, advantages, clip_low, clip_high)
    return _aggregate(cost, layout, metrics, "policy_sum", aggregation, max_response_length, token_count)


def k3_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    clamp: float | None = None,
    aggregation: str = "token-mean",
    max_response_length: int | None = None,
    token_count: float | Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> LLDSOutput:
    """Return the k3 ("low_var_kl") estimate of KL(π_new ‖ π_ref): e^x − x − 1 with x = log π_ref − log π_new.

    ``clamp``: upper bound of one token's estimate in nats, without gradient beyond; verl has 10, TRL none
    (the default). The other arguments and the errors are those of :func:`grpo_policy_loss`. Multiply the loss
    by the coefficient of the KL term. Additive metrics: ``kl_sum``, ``tokens``, ``responses``,
    ``nonfinite_tokens``.
    """
    check_above(0.0, clamp=clamp)
    layout = Layout.of(logprobs, response_mask, segment_ids)
    gap = layout.tokens(ref_logprobs=ref_logprobs).detach() - layout.tokens(logprobs=logprobs)
    # Beyond clamp + 1 on either side the estimate exceeds the clamp anyway, and exp could overflow.
    cut = gap if clamp is None else gap.clamp(-clamp - 1, clamp + 1)
    cost = cut.expm1() - cut
    cost = cost if clamp is None else cost.clamp(max=clamp)
    bad = ~gap.isfinite()
    cost, metrics = cost + nan_where(bad, gap), {"nonfinite_tokens": bad.sum()}
    return _aggregate(cost, layout, metrics, "kl_sum", aggregation, max_response_length, token_count)


def _clipped(
    layout: Layout,
    log_ratio: Tensor,
    unit_log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the pessimistic surrogate of every token, [N], and what the clip did.

    ``log_ratio`` is the token's own, ``unit_log_ratio`` that of the unit (token or response) it is judged by.
    """
    clip_high = clip_low if clip_high is None else clip_high
    check_least(0.0, clip_low=clip_low, clip_high=clip_high)
    advantage = layout.advantages(advantages)
    bad = ~(log_ratio.isfinite() & advantage.isfinite())
    ratio = unit_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    cost = -torch.min(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    low, high = (ratio < 1 - clip_low) & (advantage < 0), (ratio > 1 + clip_high) & (advantage > 0)
    return cost + nan_where(bad, log_ratio), {
        "ratio_sum": ratio.detach().masked_fill(~layout.mask, 0).sum(),
        "clipped_tokens": (low | high).sum(),
        "clipped_low_tokens": low.sum(),
        "clipped_high_tokens": high.sum(),
        "nonfinite_tokens": bad.sum(),
    }


def _aggregate(
    cost: Tensor,
    layout: Layout,
    metrics: dict[str, Tensor],
    name: str,
    aggregation: str,
    max_response_length: int | None,
    token_count: float | Tensor | None,
) -> LLDSOutput:
    """Average the cost of the tokens, [N], and complete the metrics."""
    check_choice(("token-mean", "sequence-mean", "dr_grpo"), aggregation=aggregation)
    check_least(1, max_response_length=max_response_length)
    if (aggregation == "dr_grpo") != (max_response_length is not None):
        raise LLDSError('max_response_length goes with aggregation="dr_grpo" alone, which needs it.')
    if aggregation == "sequence-mean":
        cost = cost / _lengths(layout)
    elif max_response_length is not None:
        cost = cost / max_response_length
    total = cost.sum()
    metrics = {
        name: total.detach(),
        "tokens": layout.mask.sum(),
        "responses": spans.count_groups(layout.responses, layout.mask),
        **metrics,
    }
    count = metrics["tokens" if aggregation == "token-mean" else "responses"]
    return LLDSOutput(divide(total, count, token_count), with_ratios(metrics))


def _lengths(layout: Layout) -> Tensor:
    """Return for every policy token the number of policy tokens in its response, at least 1: [N]."""
    responses = layout.responses
    return spans.spread(spans.group_sums(layout.mask.to(layout.dtype), responses), responses).clamp(min=1)
