"""One micro-batch of verl, translated: its tensors and counts to those of :func:`llds.llds_loss`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llds.engines.verl.options import LLDSOptions
from llds.objective import LLDSOutput, llds_loss


@dataclass(frozen=True)
class BatchInfo:
    """What verl tells a loss of the optimizer batch that a micro-batch belongs to.

    ``tokens``: policy tokens in it, over all micro-batches and ranks. ``responses``: likewise. ``ranks``: data
    parallel ranks, over which gradients are averaged. None where verl does not say (its older workers).
    """

    tokens: int | None = None
    responses: int | None = None
    ranks: int = 1

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> BatchInfo:
        """Read verl's ``ActorConfig.global_batch_info``."""
        tokens, responses = info.get("batch_num_tokens"), info.get("global_batch_size")
        return cls(
            None if tokens is None else int(tokens),
            None if responses is None else int(responses),
            int(info.get("dp_size") or 1),
        )

    @property
    def responses_here(self) -> int | None:
        """Responses of the optimizer batch on one rank."""
        return None if self.responses is None else max(1, self.responses // self.ranks)


def llds_term(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    options: LLDSOptions,
    info: BatchInfo,
    *,
    answer_mask: Tensor | None = None,
    answer_weight: float = 1.0,
) -> LLDSOutput:
    """Return what this micro-batch adds to the loss, and its additive metrics.

    All tensors padded [B, T] as verl's policy losses get them: log-probs in nats, advantages per token, the
    mask bool. The losses of all micro-batches added up, and averaged over the ranks as verl averages
    gradients, are λ · Σ gate · w · max(0, d) / N of the whole optimizer batch, whatever it is cut into
    ("authors": the mean over micro-batches, weighted by their responses). Where verl says nothing of the
    batch, N is that of the micro-batch, and verl's own weighting of micro-batches applies.
    """
    scale, count = _weighing(options.normalizer, info, logprobs.shape[0])
    return llds_loss(
        logprobs,
        old_logprobs,
        advantages,
        response_mask,
        coef=options.coef * scale,
        normalizer="response" if options.normalizer == "response" else "all",
        token_count=count,
        answer_mask=answer_mask,
        answer_weight=answer_weight,
        **options.loss_options(),
    )


def _weighing(normalizer: str, info: BatchInfo, rows: int) -> tuple[float, int | None]:
    """Return a factor on λ and the N to divide by, None for the micro-batch's own.

    Gradients are averaged over ranks, so each rank's sum counts ``ranks`` times.
    """
    if normalizer == "authors":
        return (1.0 if info.responses is None else rows * info.ranks / info.responses), None
    count = info.tokens if normalizer == "all" else info.responses
    return (1.0, None) if count is None else (float(info.ranks), max(1, count))
