"""What a summed penalty is divided by. A coefficient means nothing without it.

Every normaliser is one of the counts that :func:`llds.llds_loss` reports. So the N of a whole optimizer batch
is that count added over micro-batches and ranks, and a coefficient is carried from one normaliser to another
by the counts of a batch like the ones to come.
"""

from collections.abc import Mapping

from torch import Tensor

from llds.objective.checks import check_choice, check_least

#: Normaliser -> the metric that holds its count N.
NORMALIZERS: Mapping[str, str] = {
    "all": "tokens",  # the authors' code, so the λ = 0.2 of the paper's tables
    "preserved": "preserved_tokens",  # Eq. 4
    "gated": "gated_tokens",
    "penalised": "penalised_tokens",
    "response": "responses",  # sum over a response, mean over responses
}


def normalizer_count(normalizer: str, metrics: Mapping[str, Tensor]) -> Tensor:
    """Return the N of a normaliser from additive metrics: 0-dim long, 0 if there was nothing to count."""
    check_choice(tuple(NORMALIZERS), normalizer=normalizer)
    return metrics[NORMALIZERS[normalizer]]


def divide(total: Tensor, count: Tensor, token_count: float | Tensor | None = None) -> Tensor:
    """Divide a sum by its ``count``, or by ``token_count`` in its place; nothing divided by nothing is 0."""
    check_least(1, token_count=token_count)
    divisor = count if token_count is None else token_count
    return total / (divisor.clamp(min=1) if isinstance(divisor, Tensor) else divisor)


def convert_coef(coef: float, source: str, target: str, metrics: Mapping[str, Tensor]) -> Tensor:
    """Return the coefficient that gives with ``target`` the loss that ``coef`` gives with ``source``: 0-dim.

    ``metrics``: additive metrics of a batch or, better, of many (:func:`~llds.objective.merge_metrics`).
    Exact for those; for other batches as far as their counts stand in the same proportion. NaN if ``source``
    counted nothing, for then there was no loss to match.
    """
    return coef * normalizer_count(target, metrics) / normalizer_count(source, metrics)
