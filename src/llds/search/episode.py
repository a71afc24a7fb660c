"""The tool-use episode: the policy acts, the tool answers, until there is a final answer.

All rows of a batch take their turns together: every row writes until its action ends, one call retrieves for all
that searched, the observations are read into the same key-value cache, and the next turn begins. Tokens that the
policy wrote are never tokenised again. An action ends with the token that completes ``</search>`` or
``</answer>``; that token stays whole, so it may bring characters behind the tag (such as ``>\\n``), which the
policy did write. Otherwise it ends with an end-of-sequence token, which stays in the response too, or at a limit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llds.errors import LLDSError
from llds.search.decoding import Decoder
from llds.search.passages import Passage
from llds.search.protocol import (
    CORRECTION,
    OBSERVATION_CLOSE,
    STOP_STRINGS,
    Answer,
    Malformed,
    Protocol,
    Search,
    answer_characters,
    parse_action,
)
from llds.search.retrieval import Retriever, RetrieverUnavailable, search_checked
from llds.search.sampling import Sampling, draw_uniform, sample
from llds.search.trajectory import Episode, Event, Limits, Stop, Turn

__all__ = ["Episode", "EpisodeRunner", "Event", "Limits", "Stop", "Turn"]


@dataclass
class _Row:
    """An episode under way. ``begin``, ``limit``: where the action began and how long the response may get in it."""

    number: int
    prompt_ids: list[int]
    question: str | None
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None
    answer_span: tuple[int, int] | None = None
    stop: Stop | None = None
    begin: int = 0
    limit: int = 0
    shown: int = 0

    @property
    def action_ids(self) -> list[int]:
        return self.response_ids[self.begin :]

    def write(self, token: int, logprob: float) -> None:
        self.response_ids.append(token)
        self.logprobs.append(logprob)

    def feed(self, ids: list[int]) -> None:
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def episode(self) -> Episode:
        assert self.stop is not None
        return Episode(
            self.prompt_ids,
            self.response_ids,
            self.response_mask,
            self.logprobs,
            self.turns,
            self.answer,
            self.answer_span,
            self.stop,
            self.question,
        )


class EpisodeRunner:
    """Runs episodes of a causal language model of transformers against a retriever.

    Raises :class:`LLDSError` when the limits leave no room for an observation.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        retriever: Retriever,
        protocol: Protocol | None = None,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.retriever = retriever
        self.protocol = protocol or Protocol()
        self.limits = limits or Limits()
        self.sampling = sampling or Sampling()
        self._closing_ids = self._encode(OBSERVATION_CLOSE)
        self._may_close = _MayClose(tokenizer)
        if self.limits.max_observation_tokens <= len(self._closing_ids):
            raise LLDSError(
                f"max_observation_tokens is {self.limits.max_observation_tokens}, but the closing tag alone has "
                f"{len(self._closing_ids)} tokens: raise the limit."
            )

    def for_model(self, model: Any) -> EpisodeRunner:
        """Return this runner with another model of the same tokenizer."""
        other = copy.copy(self)
        other.model = model
        return other

    def run(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        generator: torch.Generator | None = None,
        on_event: Callable[[Event], None] | None = None,
        batch_size: int | None = None,
    ) -> list[Episode]:
        """Run one episode per prompt and return them in order.

        ``prompts``: questions, which get the protocol's prompt, or token ids of whole prompts. ``generator``: the
        only source of randomness (torch's default one without it): the same state, prompts and batches give the
        same episodes. ``batch_size``: at most this many side by side. The model runs in evaluation mode and is
        put back afterwards. Raises :class:`LLDSError` for a prompt that is empty or too long.
        """
        rows = [self._row(number, prompt) for number, prompt in enumerate(prompts)]
        size = batch_size or max(1, len(rows))
        with _evaluating(self.model):
            for first in range(0, len(rows), size):
                self._run_batch(rows[first : first + size], generator, on_event)
        return [row.episode() for row in rows]

    def _row(self, number: int, prompt: str | Sequence[int]) -> _Row:
        question = prompt if isinstance(prompt, str) else None
        ids = self.protocol.prompt_ids(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        room = getattr(self.model.config, "max_position_embeddings", None)
        if not ids:
            raise LLDSError(f"Prompt {number} has no tokens: give it some text.")
        if len(ids) > self.limits.max_prompt_tokens:
            raise LLDSError(
                f"Prompt {number} has {len(ids)} tokens, more than max_prompt_tokens={self.limits.max_prompt_tokens}: "
                "raise the limit or shorten the question."
            )
        if room is not None and len(ids) + self.limits.max_response_tokens > room:
            raise LLDSError(
                f"Prompt {number} ({len(ids)} tokens) and a response of {self.limits.max_response_tokens} tokens "
                f"exceed the model's {room} positions: lower max_response_tokens."
            )
        return _Row(number, ids, question)

    def _run_batch(
        self, rows: list[_Row], generator: torch.Generator | None, on_event: Callable[[Event], None] | None
    ) -> None:
        decoder = Decoder(self.model, _pad_id(self.tokenizer))
        logits = decoder.start([row.prompt_ids for row in rows])
        batch, draw = rows, self._drawing(rows, generator)
        while batch:
            batch = self._act(decoder, batch, logits, draw, on_event)
            self._respond(batch, on_event)
            keep = [i for i, row in enumerate(batch) if row.stop is None]
            batch = [batch[i] for i in keep]
            if batch:
                logits = decoder.extend(keep, [row.prompt_ids + row.response_ids for row in batch])

    def _drawing(
        self, rows: list[_Row], generator: torch.Generator | None
    ) -> Callable[[list[_Row]], Tensor | None]:
        """Return the source of random numbers: as many per step as there are rows at the start.

        So what a row draws doesn't depend on which of its neighbours have ended.
        """
        places = {row.number: place for place, row in enumerate(rows)}

        def draw(batch: list[_Row]) -> Tensor | None:
            if self.sampling.greedy:
                return None
            return draw_uniform(len(rows), generator)[[places[row.number] for row in batch]]

        return draw

    def _act(
        self,
        decoder: Decoder,
        batch: list[_Row],
        logits: Tensor,
        draw: Callable[[list[_Row]], Tensor | None],
        on_event: Callable[[Event], None] | None,
    ) -> list[_Row]:
        """Let every row write one action."""
        eos = _eos_ids(self.model, self.tokenizer)
        for row in batch:
            row.begin = row.shown = len(row.response_ids)
            row.limit = min(row.begin + self.limits.max_action_tokens, self.limits.max_response_tokens)
        live = list(range(len(batch)))
        alive = torch.ones(len(batch), dtype=torch.bool, device=logits.device)
        while True:
            tokens, logprobs = sample(logits, self.sampling, draw(batch))
            drawn, scores = tokens.tolist(), logprobs.tolist()
            ended = []
            for i in live:
                row, token = batch[i], drawn[i]
                row.write(token, scores[i])
                if token in eos or len(row.response_ids) >= row.limit or self._completes_tag(row, token):
                    ended.append(i)
                if on_event:
                    self._stream(row, i in ended, eos, on_event)
            if ended:
                live = [i for i in live if i not in ended]
                if not live:
                    break
                alive[ended] = False
            logits = decoder.step(tokens, alive)
        for row in batch:
            self._finish_action(row, eos)
        return batch

    def _completes_tag(self, row: _Row, token: int) -> bool:
        return self._may_close[token] and any(tag in self._decode(row.action_ids) for tag in STOP_STRINGS)

    def _finish_action(self, row: _Row, eos: set[int]) -> None:
        """Read the action that ``row`` has just written, and end the episode if no feedback may follow."""
        ids = row.action_ids
        row.response_mask += [1] * len(ids)
        written = ids[:-1] if ids[-1] in eos else ids
        text = self._decode(written)
        action = parse_action(text)
        end = len(row.response_ids)
        row.turns.append(Turn(action, text, row.begin, end))
        ended_itself = ids[-1] in eos and isinstance(action, Malformed)
        if isinstance(action, Answer):
            row.stop, row.answer = "answer", action.text
            row.answer_span = self._answer_span(row.begin, written, text)
        elif ended_itself and not self.protocol.correct_eos:
            row.stop = "eos"
        elif len(row.turns) > self.limits.max_turns:
            row.stop = "eos" if ended_itself else "turns"
        elif end >= self.limits.max_response_tokens:
            row.stop = "eos" if ended_itself else "length"

    def _answer_span(self, begin: int, ids: list[int], text: str) -> tuple[int, int]:
        characters = answer_characters(text)
        assert characters is not None
        first, last = characters
        start = self._tokens_for(ids, first + 1) - 1
        return begin + start, begin + self._tokens_for(ids, last)

    def _tokens_for(self, ids: list[int], characters: int) -> int:
        """Return how many leading tokens it takes to write that many characters."""
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self._decode(ids[:middle])) < characters:
                low = middle + 1
            else:
                high = middle
        return low

    def _respond(self, batch: Iterable[_Row], on_event: Callable[[Event], None] | None) -> None:
        """Give every row that goes on its search results or its correction; report answers."""
        going = [row for row in batch if row.stop is None]
        searching = [row for row in going if isinstance(row.turns[-1].action, Search)]
        queries = [row.turns[-1].action.query for row in searching]  # type: ignore[union-attr]
        try:
            found = search_checked(self.retriever, queries, self.protocol.topk)
        except RetrieverUnavailable:
            found = []
            for row in searching:
                row.stop = "tool_failed"
        for row, query, passages in zip(searching, queries, found, strict=False):
            self._observe(row, query, tuple(passages), on_event)
        for row in going:
            if isinstance(row.turns[-1].action, Malformed):
                self._correct(row, on_event)
        for row in batch:
            if row.stop == "answer" and on_event:
                on_event(Event("answer", row.number, row.answer or ""))

    def _observe(
        self, row: _Row, query: str, passages: tuple[Passage, ...], on_event: Callable[[Event], None] | None
    ) -> None:
        ids = self._encode(self.protocol.format_observation(passages, query))
        if len(ids) > self.limits.max_observation_tokens:
            ids = ids[: self.limits.max_observation_tokens - len(self._closing_ids)] + self._closing_ids
        text = self._feed(row, ids, passages)
        if on_event:
            on_event(Event("search", row.number, query))
            on_event(Event("observation", row.number, text, passages))

    def _correct(self, row: _Row, on_event: Callable[[Event], None] | None) -> None:
        text = self._feed(row, self._encode(CORRECTION), None)
        if on_event:
            on_event(Event("correction", row.number, text))

    def _feed(self, row: _Row, ids: list[int], passages: tuple[Passage, ...] | None) -> str:
        """Append feedback to ``row``, or end the episode when it doesn't fit. Returns what was fed."""
        turn = row.turns[-1]
        fits = len(row.response_ids) + len(ids) < self.limits.max_response_tokens
        observation = self._decode(ids) if fits else ""
        row.turns[-1] = Turn(turn.action, turn.text, turn.start, turn.end, passages, observation)
        if fits:
            row.feed(ids)
        else:
            row.stop = "length"
        return observation

    def _stream(self, row: _Row, ended: bool, eos: set[int], on_event: Callable[[Event], None]) -> None:
        """Report what the row's last tokens wrote, once it is whole characters."""
        ids = [token for token in row.action_ids if token not in eos]
        before = self._decode(ids[: row.shown - row.begin])
        text = self._decode(ids)
        if ended or not text.endswith("\ufffd"):
            row.shown = row.begin + len(ids)
            if len(text) > len(before):
                on_event(Event("token", row.number, text[len(before) :]))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class _MayClose(dict[int, bool]):
    """Whether a token may complete a tag, that is, holds a ``>``; asked of the tokenizer once per token.

    Byte tokens such as ``<0x3E>`` and decoded texts are both looked at, so none is missed; what it lets through
    in vain is sorted out by decoding the action.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bool:
        raw = self._tokenizer.convert_ids_to_tokens(token) or ""
        self[token] = ">" in raw or ">" in self._tokenizer.decode([token], skip_special_tokens=False)
        return self[token]


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """Every token that ends a sequence, by the tokenizer or by the model's generation settings."""
    settings = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = settings if isinstance(settings, (list, tuple)) else [settings]
    return {token for token in [tokenizer.eos_token_id, *listed] if token is not None}


def _pad_id(tokenizer: Any) -> int:
    """Any token will do, since padding is always hidden."""
    return next((int(i) for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without gradients and dropout; the model's mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
