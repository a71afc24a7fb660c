"""A batch of growing rows in front of a causal language model, with one key-value cache for all of them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llds.errors import LLDSError


class Decoder:
    """Keeps what a model has read of every row, and reads on.

    Rows differ in length, wait for each other, and leave. A row that waits, or whose text is shorter than its
    neighbours', is fed padding that the attention mask hides; positions are counted per row, so the model sees
    each row as if it were alone. Whenever rows leave or text is fed, the hidden columns are squeezed out of the
    cache.

    That works where every layer of the cache is a plain list of keys and values (``DynamicLayer``). For other
    models (sliding window, recurrent layers) every :meth:`extend` reads the rows anew, which is slower and
    exact; a warning says so once.
    """

    def __init__(self, model: Any, pad_id: int) -> None:
        parameters = _forward_parameters(model)
        names = [name for name in ("cache", "past_key_values") if name in parameters]
        if not names:
            raise LLDSError(
                f"{type(model).__name__} takes no key-value cache: the episode runner needs a causal language "
                "model of transformers whose forward accepts one."
            )
        self._model = model
        self._pad_id = pad_id
        self._cache_name = names[0]
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters
        self._device = next(model.parameters()).device
        self._cache: Any = None
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    @property
    def keeps_cache(self) -> bool:
        """Whether rows can be dropped and extended within the cache; known after :meth:`start`."""
        return all(type(layer).__name__ == "DynamicLayer" for layer in self._cache.layers)

    def start(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Read ``rows``, token ids, none empty, into a fresh cache. Returns the next token's logits, [B, V]."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        self._lengths = torch.zeros(len(rows), dtype=torch.long, device=self._device)
        self._mask = torch.zeros(len(rows), 0, dtype=torch.long, device=self._device)
        return self._read(rows)

    def step(self, tokens: Tensor, live: Tensor) -> Tensor:
        """Read one token per row. ``tokens``: int64 [B]. ``live``: bool [B]; the other rows wait.

        Returns logits [B, V]; those of waiting rows mean nothing.
        """
        tokens = tokens.masked_fill(~live, self._pad_id)
        logits = self._forward(tokens[:, None], live[:, None], self._lengths[:, None])
        self._lengths = self._lengths + live
        return logits

    def extend(self, keep: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor:
        """Go on with the rows numbered ``keep`` only, and read what each has beyond what was read of it.

        ``rows``: the whole token ids of the kept rows, each longer than what was read. Returns logits [B, V].
        """
        if not self.keeps_cache:
            _warn_once(self._model)
            return self.start(rows)
        self.drop_all_but(keep)
        return self._read([row[length:] for row, length in zip(rows, self._lengths.tolist(), strict=True)])

    def drop_all_but(self, keep: Sequence[int]) -> None:
        """Leave only the rows numbered ``keep``, in that order, and squeeze out columns that hold nothing."""
        chosen = torch.tensor(keep, device=self._device)
        mask = self._mask[chosen]
        self._lengths = self._lengths[chosen]
        # Stable, so a row's tokens stay in order; its empty columns move to the left and the surplus is cut off.
        columns = mask.argsort(dim=1, stable=True)[:, mask.shape[1] - int(self._lengths.max()) :]
        self._mask = mask.gather(1, columns)
        for layer in self._cache.layers:
            layer.keys = _take(layer.keys, chosen, columns)
            layer.values = _take(layer.values, chosen, columns)

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


def _take(states: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``states``: [B, heads, L, width]. Returns the ``rows``, and of each its own ``columns`` [rows, L']."""
    index = columns[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states[rows].gather(2, index)


def _forward_parameters(model: Any) -> Any:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(inner.forward).parameters


def _warn_once(model: Any) -> None:
    warnings.warn(
        f"{type(model).__name__} keeps no plain key-value cache, so every turn reads its rows anew: slower, and "
        "otherwise the same.",
        stacklevel=3,
    )
