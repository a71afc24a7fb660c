"""The tool-use episode: the policy acts, the tool answers, until there is a final answer.

All rows of a batch take their turns together: every row writes until its action ends, one call retrieves
for all that searched, the observations are read into the same key-value cache, and the next turn begins.
Tokens that the policy wrote are never tokenised again. An action ends with the token that completes
``</search>`` or ``</answer>``; that token stays whole, so it may bring characters behind the tag (such as
``>\\n``), which the policy did write. Otherwise it ends with an end-of-sequence token, which stays in the
response too, or at a limit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from llds.errors import LLDSError
from llds.search.decoding import Decoder
from llds.search.protocol import (
    CORRECTION,
    OBSERVATION_CLOSE,
    Answer,
    Malformed,
    Protocol,
    Search,
    parse_action,
)
from llds.search.retrieval import Passage, Retriever, RetrieverUnavailable, search_checked
from llds.search.sampling import Sampling, draw_uniform, sample
from llds.search.tokens import TokenText, eos_ids, pad_id
from llds.search.trajectory import Episode, Event, Limits, Stop, Turn

__all__ = ["Episode", "EpisodeRunner", "Event", "Limits", "Stop", "Turn"]

Watch: TypeAlias = Callable[[Event], None]

_WORTH_NARROWING = 0.75  # with a smaller share of rows still writing, the others are taken out of the batch


class EpisodeRunner:
    """Runs episodes of a causal language model of transformers against a retriever.

    ``protocol``, ``limits``, ``sampling``: their defaults are Search-R1's. Raises :class:`LLDSError` when the
    limits leave no room for an observation.
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
        self.text = TokenText(tokenizer)
        closing = len(self.text.encode(OBSERVATION_CLOSE))
        if self.limits.max_observation_tokens <= closing:
            raise LLDSError(
                f"max_observation_tokens is {self.limits.max_observation_tokens}, but the closing tag alone "
                f"has {closing} tokens: raise the limit."
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
        on_event: Watch | None = None,
        batch_size: int | None = None,
    ) -> list[Episode]:
        """Run one episode per prompt and return them in order.

        ``prompts``: questions, which get the protocol's prompt, or token ids of whole prompts.
        ``generator``: the only source of randomness (torch's default one without it): the same state,
        prompts and batches give the same episodes. ``batch_size``: at most this many side by side. The
        model runs in evaluation mode and is put back afterwards. Raises :class:`LLDSError` for a prompt
        that is empty or too long.
        """
        rows = [self._row(number, prompt) for number, prompt in enumerate(prompts)]
        size = batch_size or max(1, len(rows))
        with _evaluating(self.model):
            for first in range(0, len(rows), size):
                _Batch(self, rows[first : first + size], generator, on_event).run()
        return [row.episode() for row in rows]

    def _row(self, number: int, prompt: str | Sequence[int]) -> _Row:
        question = prompt if isinstance(prompt, str) else None
        ids = self.protocol.prompt_ids(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        longest, response = self.limits.max_prompt_tokens, self.limits.max_response_tokens
        room = getattr(self.model.config, "max_position_embeddings", None)
        if not ids:
            raise LLDSError(f"Prompt {number} has no tokens: give it some text.")
        if len(ids) > longest:
            raise LLDSError(
                f"Prompt {number} has {len(ids)} tokens, more than max_prompt_tokens={longest}: raise the "
                "limit or shorten the question."
            )
        if room is not None and len(ids) + response > room:
            raise LLDSError(
                f"Prompt {number} ({len(ids)} tokens) and a response of up to {response} tokens exceed the "
                f"model's {room} positions: lower max_response_tokens."
            )
        return _Row(number, ids, question)


@dataclass
class _Row:
    """An episode under way. Its present action begins at ``begin`` and may reach to ``limit``."""

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

    def append(self, ids: Sequence[int], logprobs: Sequence[float], by_policy: bool) -> None:
        self.response_ids += ids
        self.logprobs += logprobs
        self.response_mask += [int(by_policy)] * len(ids)

    def episode(self) -> Episode:
        assert self.stop is not None
        return Episode(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            logprobs=self.logprobs,
            turns=self.turns,
            answer=self.answer,
            answer_span=self.answer_span,
            stop=self.stop,
            question=self.question,
        )


class _Batch:
    """Rows that take their turns together. ``rows`` are those still in the decoder, in its order."""

    def __init__(
        self, runner: EpisodeRunner, rows: list[_Row], generator: torch.Generator | None, watch: Watch | None
    ) -> None:
        self.protocol, self.limits, self.sampling = runner.protocol, runner.limits, runner.sampling
        self.retriever, self.text = runner.retriever, runner.text
        self.rows = rows
        self._waiting: list[_Row] = []
        self.watch = watch
        self.eos = eos_ids(runner.model, runner.tokenizer)
        self._decoder = Decoder(runner.model, pad_id(runner.tokenizer))
        self._generator = generator
        self._first = rows[0].number
        self._size = len(rows)

    def run(self) -> None:
        logits = self._decoder.start([row.prompt_ids for row in self.rows])
        while True:
            self._act(logits)
            self._respond()
            keep = [place for place, row in enumerate(self.rows) if row.stop is None]
            if not keep:
                return
            self.rows = [self.rows[place] for place in keep]
            logits = self._decoder.extend(keep, [row.prompt_ids + row.response_ids for row in self.rows])

    def _act(self, logits: Tensor) -> None:
        """Let every row write one action."""
        for row in self.rows:
            row.begin = row.shown = len(row.response_ids)
            row.limit = min(row.begin + self.limits.max_action_tokens, self.limits.max_response_tokens)
        live = list(range(len(self.rows)))
        while True:
            tokens, logprobs = sample(logits, self.sampling, self._draw())
            ended = self._write(live, tokens.tolist(), logprobs.tolist())
            live = [place for place in live if place not in ended] if ended else live
            if not live:
                break
            if ended and len(live) < _WORTH_NARROWING * len(self.rows) and self._decoder.keeps_cache:
                tokens, live = tokens[live], self._narrow(live)
            logits = self._decoder.step(tokens, live)
        self._decoder.widen()
        self.rows, self._waiting = self._waiting + self.rows, []

    def _narrow(self, live: list[int]) -> list[int]:
        """Leave only the live rows in the decoder; others wait outside or are over. Returns new places."""
        writing = set(live)
        aside = [place for place, row in enumerate(self.rows) if row.stop is None and place not in writing]
        self._decoder.narrow(live, aside)
        self._waiting += [self.rows[place] for place in aside]
        self.rows = [self.rows[place] for place in live]
        return list(range(len(live)))

    def _draw(self) -> Tensor | None:
        """Return one random number per row still here.

        As many are drawn as the batch had rows, so what a row draws doesn't depend on which others have
        ended.
        """
        if self.sampling.greedy:
            return None
        return draw_uniform(self._size, self._generator)[[row.number - self._first for row in self.rows]]

    def _write(self, live: list[int], tokens: list[int], logprobs: list[float]) -> set[int]:
        """Append its token to each live row. Returns the places whose action it ended."""
        ended = set()
        for place in live:
            row, token = self.rows[place], tokens[place]
            row.append([token], [logprobs[place]], by_policy=True)
            over = token in self.eos or len(row.response_ids) >= row.limit
            over = over or self.text.completes_tag(row.action_ids)
            if self.watch:
                self._show(row, over)
            if over:
                ended.add(place)
                self._finish_action(row)
        return ended

    def _finish_action(self, row: _Row) -> None:
        """Read the action that ``row`` has just written, and end its episode where no feedback may follow."""
        ids = row.action_ids
        written = ids[:-1] if ids[-1] in self.eos else ids
        text = self.text.decode(written)
        action = parse_action(text)
        row.turns.append(Turn(action, text, row.begin, row.begin + len(ids)))
        gave_up = isinstance(action, Malformed) and ids[-1] in self.eos
        if isinstance(action, Answer):
            start, end = self.text.answer_tokens(written, text) or (0, 0)
            row.stop, row.answer = "answer", action.text
            row.answer_span = (row.begin + start, row.begin + end)
            self._report("answer", row, action.text)
        elif gave_up and not self.protocol.correct_eos:
            row.stop = "eos"
        elif len(row.turns) > self.limits.max_turns:
            row.stop = "eos" if gave_up else "turns"
        elif len(row.response_ids) >= self.limits.max_response_tokens:
            row.stop = "eos" if gave_up else "length"

    def _respond(self) -> None:
        """Give every row that goes on its search results or its correction."""
        searching: list[tuple[_Row, str]] = []
        for row in self.rows:
            action = row.turns[-1].action
            if row.stop is None and isinstance(action, Search):
                searching.append((row, action.query))
                self._report("search", row, action.query)
            elif row.stop is None:
                self._report("correction", row, self._feed(row, self.text.encode(CORRECTION)))
        try:
            found = search_checked(self.retriever, [query for _, query in searching], self.protocol.topk)
        except RetrieverUnavailable as error:
            for row, _ in searching:
                row.stop = "tool_failed"
                self._report("tool_failed", row, str(error))
            return
        for (row, query), passages in zip(searching, found, strict=True):
            self._observe(row, query, tuple(passages))

    def _observe(self, row: _Row, query: str, passages: tuple[Passage, ...]) -> None:
        row.turns[-1] = replace(row.turns[-1], passages=passages)
        ids = self.text.encode(self.protocol.format_observation(passages, query))
        longest = self.limits.max_observation_tokens
        if len(ids) > longest:
            closing = self.text.encode(OBSERVATION_CLOSE)
            ids = ids[: longest - len(closing)] + closing
        self._report("observation", row, self._feed(row, ids), passages)

    def _feed(self, row: _Row, ids: list[int]) -> str:
        """Append feedback to ``row``, or end its episode for want of room. Returns what was fed."""
        if len(row.response_ids) + len(ids) >= self.limits.max_response_tokens:
            row.stop = "length"
            return ""
        row.append(ids, [0.0] * len(ids), by_policy=False)
        text = self.text.decode(ids)
        row.turns[-1] = replace(row.turns[-1], observation=text)
        return text

    def _show(self, row: _Row, over: bool) -> None:
        """Report what the row's last tokens wrote, as soon as it is whole characters."""
        ids = [token for token in row.action_ids if token not in self.eos]
        before = self.text.decode(ids[: row.shown - row.begin])
        text = self.text.decode(ids)
        if over or not text.endswith("\ufffd"):
            row.shown = row.begin + len(ids)
            self._report("token", row, text[len(before) :])

    def _report(self, kind: Any, row: _Row, text: str, passages: tuple[Passage, ...] = ()) -> None:
        if self.watch and (text or kind in ("search", "answer")):  # else nothing was written or fed
            self.watch(Event(kind, row.number, text, passages))


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
