"""Drawing the next token: temperature, top-k, nucleus, greedy; reproducible from one generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from llds.errors import LLDSError

Generators: TypeAlias = torch.Generator | Sequence[torch.Generator] | None
"""One source of randomness for a batch, one per row, or torch's default one."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    ``temperature``: divides the logits; 0 is greedy. ``top_k``: draw among this many most likely tokens, 0
    among all. ``top_p``: then among the fewest tokens whose share of the rest reaches this.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise LLDSError(f"temperature is {self.temperature}: give 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise LLDSError(f"top_p is {self.top_p}: give a share above 0, at most 1.")
        if self.top_k < 0:
            raise LLDSError(f"top_k is {self.top_k}: give 0 (all tokens) or more.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no random number is used."""
        return self.temperature == 0


GREEDY = Sampling(temperature=0.0)


def draw_uniform(rows: int, generator: torch.Generator | None) -> Tensor:
    """Return random numbers in [0, 1), float32 [rows], on the generator's device (CPU without one)."""
    device = "cpu" if generator is None else generator.device
    return torch.rand(rows, generator=generator, device=device)


def sample(logits: Tensor, sampling: Sampling, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    ``logits``: [B, V], any float dtype. ``uniform``: float32 [B] in [0, 1), unused (may be ``None``) when
    greedy. Returns tokens, int64 [B], and their log-probabilities in nats, float32 [B].

    The log-probabilities are those of softmax(logits / temperature) over the whole vocabulary, also under
    top-k and nucleus sampling: that is what TRL and verl recompute in training. Greedy takes temperature 1
    for them.
    """
    logits = logits.float()
    if not sampling.greedy and sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    logprobs = logits - logits.logsumexp(dim=-1, keepdim=True)
    if sampling.greedy:
        tokens = logprobs.argmax(dim=-1)
    else:
        assert uniform is not None
        tokens = _inverse_cdf(_restrict(logprobs, sampling).exp(), uniform.to(logits.device))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _restrict(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Set the tokens outside top-k and the nucleus to -inf."""
    if 0 < sampling.top_k < logprobs.shape[-1]:
        least = logprobs.topk(sampling.top_k, dim=-1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
    if sampling.top_p < 1.0:
        probs, order = logprobs.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        before = probs.cumsum(dim=-1) - probs
        outside = (before >= sampling.top_p).scatter(1, order, before >= sampling.top_p)
        logprobs = logprobs.masked_fill(outside, -torch.inf)
    return logprobs


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return for each row the first token whose cumulated weight exceeds ``uniform`` times the row's total.

    In float64, since a float32 sum over a large vocabulary loses the tail. A token of weight 0 can't be
    drawn.
    """
    home = weights.device
    if home.type == "mps":  # has no float64
        weights, uniform = weights.cpu(), uniform.cpu()
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform.double()[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True)[:, 0].to(home)
