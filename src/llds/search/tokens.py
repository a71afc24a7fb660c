"""Between the tokens that a policy wrote and the text that they mean, without tokenising anything twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llds.search.protocol import STOP_STRINGS, answer_characters


class TokenText:
    """Reads actions token by token and writes feedback as tokens, with one tokenizer.

    Special tokens are decoded too, so tags may be special tokens of the vocabulary.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._may_close: dict[int, bool] = {}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``, without special ones round it."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        # A cleaned-up text would be shorter than what its tokens wrote.
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def completes_tag(self, ids: Sequence[int]) -> bool:
        """Return whether the last of ``ids`` completes ``</search>`` or ``</answer>``.

        It is assumed that no earlier one did. Tags may be one token or many, and share tokens with other
        text. Only when the last token can hold a ``>`` is anything decoded.
        """
        if not self._can_close(ids[-1]):
            return False
        text = self.decode(ids)
        return any(tag in text for tag in STOP_STRINGS)

    def answer_tokens(self, ids: Sequence[int], text: str) -> tuple[int, int] | None:
        """Return the start and end, within ``ids``, of the tokens that wrote the answer, tags included.

        ``text``: ``decode(ids)``. A token that also wrote a neighbouring character belongs to the answer.
        ``None`` when ``text`` is no answer.
        """
        span = answer_characters(text)
        if span is None:
            return None
        return self._tokens_for(ids, span[0] + 1) - 1, self._tokens_for(ids, span[1])

    def _tokens_for(self, ids: Sequence[int], characters: int) -> int:
        """Return how many leading tokens it takes to write that many characters."""
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.decode(ids[:middle])) < characters:
                low = middle + 1
            else:
                high = middle
        return low

    def _can_close(self, token: int) -> bool:
        """Whether a token may hold a ``>``, raw (byte tokens look like ``<0x3E>``) or decoded; asked once."""
        if token not in self._may_close:
            raw = self._tokenizer.convert_ids_to_tokens(token) or ""
            self._may_close[token] = ">" in raw or ">" in self.decode([token])
        return self._may_close[token]


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every token that ends a sequence, by the tokenizer or by the model's generation settings."""
    settings = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = settings if isinstance(settings, (list, tuple)) else [settings]
    return frozenset(token for token in [tokenizer.eos_token_id, *listed] if token is not None)


def pad_id(tokenizer: Any) -> int:
    """Return a token for padding. Any will do, since padding is always hidden by a mask."""
    return next(
        (int(token) for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0
    )
