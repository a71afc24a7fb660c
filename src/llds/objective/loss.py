"""The LLDS regulariser (arXiv 2512.04220): what a good response did must not become less likely."""

import torch
from torch import Tensor

from llds.errors import LLDSError
from llds.objective import spans
from llds.objective.checks import check_above, check_choice, check_least
from llds.objective.layout import Layout, nan_where
from llds.objective.metrics import LLDSOutput, with_ratios
from llds.objective.normalizers import NORMALIZERS, divide, normalizer_count


def llds_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    coef: float | Tensor = 0.2,
    gate: str = "action",
    normalizer: str = "all",
    answer_mask: Tensor | None = None,
    answer_weight: float | Tensor = 1.0,
    token_count: float | Tensor | None = None,
    preserve: str = "nonnegative",
    advantage_tol: float = 1e-3,
    dead_zone: float | Tensor = 0.0,
    penalty: str = "relu",
    huber_width: float = 0.1,
    segment_ids: Tensor | None = None,
    compat: str | None = None,
) -> LLDSOutput:
    """Penalise the likelihood that the actions of preserved responses lost: λ · Σ gate · w · max(0, d) / N.

    d = ``old_logprobs`` − ``logprobs`` is the displacement of a token in nats; positive means that it became
    less likely. Gate and weight carry no gradient, so on a penalised token d loss / d logprob = −λ · w / N,
    and 0 anywhere else. Add the loss to the policy loss. It is exactly 0 where ``logprobs`` equals
    ``old_logprobs``, as in the first optimizer step after a rollout.

    Nothing here waits for the device and no shape depends on data: it compiles with ``fullgraph=True``.

    Args:
        logprobs: log π_new of the sampled tokens, floating point; padded [B, T] or, with ``segment_ids``,
            packed [..., N]. float64 is computed in float64, everything else in float32.
        old_logprobs: the same under the policy to hold on to. The paper's is the one that sampled;
            :mod:`llds.objective.anchor` tells of the others.
        advantages: per response, [B] or [B, 1] (packed: [S], looked up by segment id), or per token.
        response_mask: 1 where the policy wrote, 0 on prompt, feedback and padding; any dtype. An action is a
            maximal run of ones. What stands under a 0 reaches neither value nor gradient, not even a NaN.
        coef: λ ≥ 0. Its size belongs to its normaliser: one λ acts several times as strongly with "preserved"
            as with "all" (:func:`~llds.objective.convert_coef`).
        gate: what must have become less likely as a whole before its tokens are penalised: the "action" (Eq.
            4), the "response" (Eq. 10), or only the "token" itself (Eq. 9).
        normalizer: N counts "all" policy tokens (the authors' code and the paper's figures), "preserved"
            tokens (Eq. 4), "gated" tokens, "penalised" tokens, or responses ("response").
        answer_mask: 1 on the tokens of the final answer (LLDS-MA, Eq. 5); shape of ``logprobs``.
        answer_weight: w of those tokens; see :func:`~llds.objective.answer_weight_from_searches`.
        token_count: N itself, in place of this call's own count. Under gradient accumulation or data
            parallelism pass the count of the whole optimizer batch, else λ changes its meaning with the
            micro-batch size (divided by the number of ranks where gradients are averaged over ranks, not
            summed).
        preserve: "nonnegative" (A ≥ 0, the paper's Y_pre) or "positive" (A > 0).
        advantage_tol: an |A| up to this counts as 0. Rounding gives groups of equal rewards an advantage of
            up to about 7e-4 in place of 0, and its sign would decide over whole responses; real ones are far
            larger.
        dead_zone: nats per token to overlook, since numerical noise alone moves log-probs: a gate opens only
            if Σ d > dead_zone · length, and a token is penalised only for what it lost beyond it. 0 is the
            paper.
        penalty: "relu" (the paper; full gradient however small the drop) or "huber", which is quadratic up to
            ``huber_width`` and linear beyond, so that the gradient fades with the drop.
        huber_width: nats, above 0.
        segment_ids: integers; the tokens of one response carry the same id and lie together
            (:func:`~llds.objective.segment_ids_from_cu_seqlens`).
        compat: "authors" does as the authors' code where that differs: the sign of A decides without
            tolerance, and a gate looks at runs of preserved tokens. (There the gradient of max(0, d) at d = 0
            is a half; here it stays 0.)

    Returns:
        The loss, and metrics. Additive: ``penalty_sum`` (before λ and N); ``tokens``, ``preserved_tokens``,
        ``answer_tokens``, ``gated_tokens``, ``penalised_tokens``; ``responses``; ``actions``,
        ``actions_preserved``, ``actions_open`` (with a preserved token behind an open gate); ``moved_tokens``
        (d ≠ 0; none means that nothing could be penalised), ``displacement_abs_sum``; by the sign of the
        advantage ``tokens_*``, ``responses_*``, ``displacement_sum_*``, ``logprob_sum_*``;
        ``nonfinite_tokens``. Ratios of these, which do not add up, are named in
        :data:`llds.objective.metrics.RATIOS`.

        A policy token whose log-prob or advantage is not finite makes the loss and its own gradient NaN.

    Raises:
        LLDSError: a shape, a dtype, a name or a number is wrong.
    """
    check_choice(("action", "response", "token"), gate=gate)
    check_choice(tuple(NORMALIZERS), normalizer=normalizer)
    check_choice(("nonnegative", "positive"), preserve=preserve)
    check_choice(("relu", "huber"), penalty=penalty)
    check_choice((None, "authors"), compat=compat)
    check_least(0.0, coef=coef, answer_weight=answer_weight, advantage_tol=advantage_tol, dead_zone=dead_zone)
    check_above(0.0, huber_width=huber_width)
    if answer_mask is None and (isinstance(answer_weight, Tensor) or answer_weight != 1.0):
        raise LLDSError(
            "answer_weight needs answer_mask, 1 on the tokens of the final answer, but it is None."
        )
    if compat == "authors" and (normalizer, preserve) != ("all", "nonnegative"):
        raise LLDSError(
            'compat="authors" goes with normalizer="all" and preserve="nonnegative" only, '
            f"but they are {normalizer!r} and {preserve!r}."
        )

    layout = Layout.of(logprobs, response_mask, segment_ids)
    new = layout.tokens(logprobs=logprobs)
    old = layout.tokens(old_logprobs=old_logprobs).detach()
    advantage = layout.advantages(advantages)

    signs = _signs(advantage, layout.mask, 0.0 if compat == "authors" else advantage_tol)
    preserved = signs["positive"] | signs["zero"] if preserve == "nonnegative" else signs["positive"]
    displacement = old - new
    excess = displacement - dead_zone
    looked_at = preserved if compat == "authors" else layout.mask
    gated = preserved & _gate(gate, excess.detach(), looked_at, layout.starts)

    cost = _penalty(penalty, excess, huber_width)
    answer = torch.zeros_like(gated) if answer_mask is None else layout.flags(answer_mask=answer_mask)
    cost = torch.where(answer, cost * answer_weight, cost)
    bad = ~(displacement.isfinite() & advantage.isfinite())
    total = (cost.masked_fill(~gated, 0) + nan_where(bad, displacement)).sum()

    metrics = {
        "penalty_sum": total.detach(),
        "preserved_tokens": preserved.sum(),
        "answer_tokens": answer.sum(),
        "gated_tokens": gated.sum(),
        "penalised_tokens": (gated & (excess > 0)).sum(),
        **_actions(layout, preserved, gated),
        **_likelihood(layout, new.detach(), displacement.detach(), signs),
        "nonfinite_tokens": bad.sum(),
    }
    loss = coef * divide(total, normalizer_count(normalizer, metrics), token_count)
    return LLDSOutput(loss, with_ratios(metrics))


def _gate(gate: str, excess: Tensor, mask: Tensor, starts: Tensor) -> Tensor:
    """Say of the tokens in ``mask`` whether the unit they belong to became less likely: bool [N]."""
    if gate == "token":
        return mask
    ids = (spans.action_ids if gate == "action" else spans.response_ids)(mask, starts)
    return spans.spread(spans.group_sums(excess, ids), ids) > 0


def _penalty(penalty: str, excess: Tensor, width: float) -> Tensor:
    """Shape the drop in nats: relu keeps it, Huber's slope rises from 0 to 1 over ``width``."""
    drop = excess.relu()
    if penalty == "relu":
        return drop
    return torch.where(drop < width, drop.square() / (2 * width), drop - width / 2)


def _signs(advantage: Tensor, mask: Tensor, tol: float) -> dict[str, Tensor]:
    """Split the policy's tokens by the sign of their advantage, bool [N] each; NaN has none."""
    return {
        "positive": mask & (advantage > tol),
        "zero": mask & (advantage.abs() <= tol),
        "negative": mask & (advantage < -tol),
    }


def _actions(layout: Layout, preserved: Tensor, gated: Tensor) -> dict[str, Tensor]:
    """Count the actions, those with a preserved token, and those with one behind an open gate."""
    actions = spans.action_ids(layout.mask, layout.starts)
    parts = {"actions": layout.mask, "actions_preserved": preserved, "actions_open": gated}
    return {name: spans.count_groups(actions, part) for name, part in parts.items()}


def _likelihood(
    layout: Layout, logprob: Tensor, displacement: Tensor, signs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Sum what likelihood did, over all tokens and by the sign of their advantage."""
    responses = layout.responses
    sums = {
        "tokens": layout.mask.sum(),
        "responses": spans.count_groups(responses, layout.mask),
        "moved_tokens": (displacement != 0).sum(),
        "displacement_abs_sum": displacement.abs().sum(),
    }
    for sign, part in signs.items():
        sums[f"tokens_{sign}"] = part.sum()
        sums[f"responses_{sign}"] = spans.count_groups(responses, part)
        sums[f"displacement_sum_{sign}"] = displacement.masked_fill(~part, 0).sum()
        sums[f"logprob_sum_{sign}"] = logprob.masked_fill(~part, 0).sum()
    return sums
