"""The policy: a decoder-only transformer of some hundred thousand weights, and its key-value cache.

Rows of a batch are aligned: every prompt has the same length and padding comes last, where a causal model does
not see it. So attention needs no mask, and position is the same number for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llds.errors import LLDSError
from llds.objective.checks import check_least


@dataclass(frozen=True)
class Body:
    """Size of the organism: layers, width, attention heads, and positions (tokens of prompt and response)."""

    layers: int = 2
    width: int = 64
    heads: int = 2
    positions: int = 48

    def __post_init__(self) -> None:
        check_least(1, layers=self.layers, width=self.width, heads=self.heads, positions=self.positions)
        if self.width % self.heads:
            raise LLDSError(
                f"width must be a multiple of heads, but {self.width} is not one of {self.heads}."
            )


class Cache:
    """Keys and values of the tokens read so far: [layers, 2, B, H, positions, D] with room for all of them."""

    def __init__(self, body: Body, rows: int) -> None:
        shape = (body.layers, 2, rows, body.heads, body.positions, body.width // body.heads)
        self.content = torch.zeros(shape)
        self.length = 0

    def keep(self, rows: Tensor) -> None:
        """Keep only ``rows`` (long) of the batch."""
        self.content = self.content[:, :, rows]


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a layer norm and added to the stream."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.heads = body.heads
        self.before_attention = nn.LayerNorm(body.width)
        self.to_qkv = nn.Linear(body.width, 3 * body.width, bias=False)
        self.from_heads = nn.Linear(body.width, body.width, bias=False)
        self.before_feed = nn.LayerNorm(body.width)
        self.widen = nn.Linear(body.width, 4 * body.width)
        self.narrow = nn.Linear(4 * body.width, body.width)

    def forward(self, stream: Tensor, cache: Tensor | None = None, length: int = 0) -> Tensor:
        """Add to ``stream`` [B, T, W]; ``cache`` [2, B, H, positions, D] already holds ``length`` tokens."""
        rows, steps, width = stream.shape
        qkv = self.to_qkv(self.before_attention(stream)).view(rows, steps, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, length : length + steps] = key
            cache[1, :, :, length : length + steps] = value
            key, value = cache[:, :, :, : length + steps]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=steps > 1)
        stream = stream + self.from_heads(mixed.transpose(1, 2).reshape(rows, steps, width))
        fed: Tensor = self.narrow(F.relu(self.widen(self.before_feed(stream))))
        return stream + fed


class Organism(nn.Module):
    """The policy. ``vocabulary_size``: number of token ids; ``body``: its size."""

    def __init__(self, vocabulary_size: int, body: Body) -> None:
        super().__init__()
        self.body = body
        self.tokens = nn.Embedding(vocabulary_size, body.width)
        self.places = nn.Embedding(body.positions, body.width)
        self.blocks = nn.ModuleList(Block(body) for _ in range(body.layers))
        self.last_norm = nn.LayerNorm(body.width)
        self.head = nn.Linear(body.width, vocabulary_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.05)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the last hidden state at every token of ``ids`` [B, T]: [B, T, W]."""
        stream = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        normed: Tensor = self.last_norm(stream)
        return normed

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits after every token of ``ids`` [B, T]: [B, T, V]."""
        logits: Tensor = self.head(self.hidden(ids))
        return logits

    def read(self, ids: Tensor, cache: Cache) -> Tensor:
        """Read ``ids`` [B, T] into the cache and return the logits after the last one: [B, V].

        More than one token at a time only into an empty cache.
        """
        first, after = cache.length, cache.length + ids.shape[1]
        stream = self.tokens(ids) + self.places.weight[first:after]
        for block, layer in zip(self.blocks, cache.content, strict=True):
            stream = block(stream, layer, first)
        cache.length = after
        logits: Tensor = self.head(self.last_norm(stream[:, -1]))
        return logits


@dataclass(frozen=True)
class Scores:
    """What a policy makes of the tokens of responses, each [B, T]: log-probs and entropies in nats.

    ``hidden`` [B, T, W]: the state that each token was predicted from.
    """

    logprobs: Tensor
    entropies: Tensor
    hidden: Tensor


def score(model: Organism, ids: Tensor, prompt_length: int, *, entropy_gradient: bool = False) -> Scores:
    """Read ``ids`` [B, P + T] and score the responses in them."""
    hidden = model.hidden(ids)[:, prompt_length - 1 : -1]
    every = model.head(hidden).log_softmax(-1)
    logprobs = every.gather(-1, ids[:, prompt_length:].unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and every.requires_grad):
        entropies = -(every.exp() * every).sum(-1)
    return Scores(logprobs, entropies, hidden)


@torch.no_grad()
def score_by_length(
    model: Organism, ids: Tensor, lengths: Tensor, prompt_length: int, parts: int = 4
) -> Scores:
    """Score without a gradient, in ``parts`` of rows of like length, so that little padding is read.

    ``lengths`` [B]: tokens of each response. What lies behind is 0 or what a padding token got.
    """
    width = ids.shape[1] - prompt_length
    logprobs, entropies = torch.zeros(len(ids), width), torch.zeros(len(ids), width)
    hidden = torch.zeros(len(ids), width, model.body.width)
    for rows in lengths.argsort().chunk(parts):
        longest = int(lengths[rows].max())
        scores = score(model, ids[rows, : prompt_length + longest], prompt_length)
        logprobs[rows, :longest] = scores.logprobs
        entropies[rows, :longest] = scores.entropies
        hidden[rows, :longest] = scores.hidden
    return Scores(logprobs, entropies, hidden)
