"""A batch of growing rows in front of a causal language model, with one key-value cache for all of them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from llds.errors import LLDSError


class Decoder:
    """Keeps what a model has read of every row, and reads on.

    Rows differ in length, wait for each other, and leave. A row that waits, or whose new text is shorter
    than its neighbours', is fed padding that the attention mask hides; positions are counted per row, so
    the model sees each row as if it were alone. Before rows are read on, columns that hide all are squeezed
    out.

    That works where every layer of the cache is a plain list of keys and values (``DynamicLayer``). For
    other models (sliding windows, recurrent layers) every :meth:`extend` reads the rows anew, which is
    slower and exact; a warning says so.
    """

    def __init__(self, model: Any, pad_id: int) -> None:
        parameters = _forward_parameters(model)
        names = [name for name in ("cache", "past_key_values") if name in parameters]
        if not names:
            raise LLDSError(
                f"{type(model).__name__} takes no key-value cache: the episode runner needs a causal "
                "language model of transformers whose forward accepts one."
            )
        self._model = model
        self._pad_id = pad_id
        self._cache_name = names[0]
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters
        self._device = next(model.parameters()).device
        self._cache: Any = None
        self._mask = self._lengths = torch.zeros(0, dtype=torch.long)
        self._aside: list[_Read] = []

    @property
    def keeps_cache(self) -> bool:
        """Whether rows can be rearranged within the cache; known after :meth:`start`."""
        return all(type(layer).__name__ == "DynamicLayer" for layer in self._cache.layers)

    def start(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Read ``rows``, none empty, into a fresh cache. Returns the next token's logits, [B, V]."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        self._lengths = torch.zeros(len(rows), dtype=torch.long, device=self._device)
        self._mask = torch.zeros(len(rows), 0, dtype=torch.long, device=self._device)
        return self._read(rows)

    def step(self, tokens: Tensor, live: Sequence[int]) -> Tensor:
        """Read one token per row. ``tokens``: int64 [B]. ``live``: places of the rows that grow; others wait.

        Returns logits [B, V]; those of waiting rows mean nothing.
        """
        grows = torch.zeros(len(tokens), dtype=torch.bool)
        grows[list(live)] = True
        grows = grows.to(self._device)
        tokens = tokens.masked_fill(~grows, self._pad_id)
        logits = self._forward(tokens[:, None], grows[:, None], self._lengths[:, None])
        self._lengths = self._lengths + grows
        return logits

    def extend(self, keep: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor:
        """Go on with the rows at ``keep`` only, and read what each has beyond what was read of it.

        ``rows``: the whole token ids of the kept rows, each longer than what was read. Returns logits [B, V].
        """
        if not self.keeps_cache:
            _warn_slow(self._model)
            return self.start(rows)
        self._put(self._all().take(keep).squeeze())
        lengths = self._lengths.tolist()
        return self._read([row[length:] for row, length in zip(rows, lengths, strict=True)])

    def narrow(self, keep: Sequence[int], aside: Sequence[int]) -> None:
        """Go on with the rows at ``keep`` and set those at ``aside`` aside; the others are forgotten."""
        everything = self._all()
        if aside:
            self._aside.append(everything.take(aside))
        self._put(everything.take(keep))

    def widen(self) -> None:
        """Bring back the rows set aside. They come first, in the order they went, then the present ones."""
        if self._aside:
            self._put(_Read.join([*self._aside, self._all()]))
            self._aside = []

    def _all(self) -> _Read:
        return _Read(self._mask, self._lengths, [(layer.keys, layer.values) for layer in self._cache.layers])

    def _put(self, read: _Read) -> None:
        self._mask, self._lengths = read.mask, read.lengths
        for layer, (keys, values) in zip(self._cache.layers, read.layers, strict=True):
            layer.keys, layer.values = keys, values

    def _read(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        """Read one chunk per row, padded on the left so that the last column holds every row's last token."""
        width = max(map(len, chunks))
        padded = [[self._pad_id] * (width - len(chunk)) + list(chunk) for chunk in chunks]
        sizes = torch.tensor([len(chunk) for chunk in chunks], device=self._device)
        offsets = torch.arange(width, device=self._device) - (width - sizes)[:, None]
        positions = (self._lengths[:, None] + offsets).clamp(min=0)
        logits = self._forward(torch.tensor(padded, device=self._device), offsets >= 0, positions)
        self._lengths = self._lengths + sizes
        return logits

    def _forward(self, tokens: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, visible.long()], dim=1)
        inputs = {"position_ids": positions} if self._takes_positions else {}
        inputs[self._cache_name] = self._cache
        output = self._model(
            input_ids=tokens, attention_mask=self._mask, use_cache=True, **inputs, **self._options
        )
        logits: Tensor = output.logits[:, -1]
        return logits


@dataclass(frozen=True)
class _Read:
    """What was read of some rows.

    ``mask``: [B, L], 1 where a column holds a token. ``lengths``: [B]. ``layers``: keys and values, each
    [B, heads, L, width].
    """

    mask: Tensor
    lengths: Tensor
    layers: list[tuple[Tensor, Tensor]]

    def take(self, places: Sequence[int]) -> _Read:
        """Return the rows at ``places``."""
        rows = torch.tensor(places, device=self.mask.device)
        return _Read(
            self.mask[rows], self.lengths[rows], [(keys[rows], values[rows]) for keys, values in self.layers]
        )

    def squeeze(self) -> _Read:
        """Return the same rows in as few columns as they fit, aligned on the right."""
        # Stable, so tokens stay in order; empty columns move to the left and the surplus is cut off.
        columns = self.mask.argsort(dim=1, stable=True)[:, self.mask.shape[1] - int(self.lengths.max()) :]
        layers = [(_columns(keys, columns), _columns(values, columns)) for keys, values in self.layers]
        return _Read(self.mask.gather(1, columns), self.lengths, layers)

    @staticmethod
    def join(parts: Sequence[_Read]) -> _Read:
        """Return the rows of all ``parts``, one part after the other."""
        width = max(part.mask.shape[1] for part in parts)
        gaps = [width - part.mask.shape[1] for part in parts]
        mask = torch.cat([pad(part.mask, (gap, 0)) for part, gap in zip(parts, gaps, strict=True)])
        layers = [
            (_join([keys for keys, _ in layer], gaps), _join([values for _, values in layer], gaps))
            for layer in zip(*(part.layers for part in parts), strict=True)
        ]
        return _Read(mask, torch.cat([part.lengths for part in parts]), layers)


def _columns(states: Tensor, columns: Tensor) -> Tensor:
    """Return of each row of ``states`` [B, heads, L, width] its own ``columns`` [B, L']."""
    rows = torch.arange(len(columns), device=columns.device)[:, None]
    return states[rows, :, columns].transpose(1, 2)


def _join(states: Sequence[Tensor], gaps: Sequence[int]) -> Tensor:
    return torch.cat([pad(state, (0, 0, gap, 0)) for state, gap in zip(states, gaps, strict=True)])


def _forward_parameters(model: Any) -> Any:
    """Those of the class, as trainers wrap the instance's ``forward``; of the model inside an adapter."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(type(inner).forward).parameters


def _warn_slow(model: Any) -> None:
    warnings.warn(
        f"{type(model).__name__} keeps no plain key-value cache, so every turn reads its rows anew: slower, "
        "and otherwise the same.",
        stacklevel=3,
    )
