"""What the summed penalty is divided by. A coefficient means nothing without it.

Every normaliser is one of the counts that :func:`llds.llds_loss` reports, so a coefficient can be carried from one
to another with the metrics of any batch that is like the ones to come.
"""

from collections.abc import Mapping

from torch import Tensor

from llds.errors import LLDSError

#: Normaliser -> the metric that holds its count N.
NORMALIZERS: Mapping[str, str] = {
    "all": "tokens",  # the authors' code; λ = 0.2 of the paper's tables belongs to this one
    "preserved": "preserved_tokens",  # Eq. 4
    "gated": "gated_tokens",
    "penalised": "penalised_tokens",
    "response": "responses",  # the mean over responses of the sum over a response
}


def count_of(normalizer: str, metrics: Mapping[str, Tensor]) -> Tensor:
    """Return N of a normaliser, at least 1, from additive metrics: 0-dim tensor, no host sync."""
    return metrics[metric_of(normalizer)].clamp(min=1)


def metric_of(normalizer: str) -> str:
    """Return the name of the metric that a normaliser divides by; ``LLDSError`` when there is no such one."""
    try:
        return NORMALIZERS[normalizer]
    except KeyError:
        allowed = ", ".join(NORMALIZERS)
        raise LLDSError(f"normalizer must be one of {allowed}, but is {normalizer!r}.") from None
