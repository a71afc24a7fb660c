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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from llds.errors import LLDSError
from llds.search.decoding import Decoder
from llds.search.protocol import Protocol
from llds.search.retrieval import Retriever
from llds.search.rules import Row, Rules, Watch, check_prompt, check_room
from llds.search.sampling import Generators, Sampling, draw_uniform, sample
from llds.search.tokens import TokenText, eos_ids, pad_id
from llds.search.trajectory import Episode, Event, Limits, Stop, Turn

__all__ = ["Episode", "EpisodeRunner", "Event", "Limits", "Stop", "Turn"]

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
        check_room(self.text, self.limits)

    def for_model(self, model: Any) -> EpisodeRunner:
        """Return this runner with another model of the same tokenizer."""
        other = copy.copy(self)
        other.model = model
        return other

    def run(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        generator: Generators = None,
        on_event: Watch | None = None,
        batch_size: int | None = None,
    ) -> list[Episode]:
        """Run one episode per prompt and return them in order.

        ``prompts``: questions, which get the protocol's prompt, or token ids of whole prompts.
        ``generator``: the only source of randomness (torch's default one without it): the same state,
        prompts and batches give the same episodes. With one generator per prompt an episode depends on its
        own alone, whatever runs beside it (but for rounding, which differs with the batch).
        ``batch_size``: at most this many side by side. The model runs in evaluation mode and is put back
        afterwards. Raises :class:`LLDSError` for a prompt that is empty or too long, and when there are not
        as many generators as prompts.
        """
        if isinstance(generator, Sequence) and len(generator) != len(prompts):
            raise LLDSError(
                f"There are {len(generator)} generators for {len(prompts)} prompts: give each one."
            )
        rows = [self._row(number, prompt) for number, prompt in enumerate(prompts)]
        size = batch_size or max(1, len(rows))
        with _evaluating(self.model):
            for first in range(0, len(rows), size):
                _Batch(self, rows[first : first + size], generator, on_event).run()
        return [row.episode() for row in rows]

    def _row(self, number: int, prompt: str | Sequence[int]) -> Row:
        question = prompt if isinstance(prompt, str) else None
        ids = self.protocol.prompt_ids(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        check_prompt(number, ids, self.limits, getattr(self.model.config, "max_position_embeddings", None))
        return Row(number, ids, question)


class _Batch:
    """Rows that take their turns together. ``rows`` are those still in the decoder, in its order."""

    def __init__(
        self, runner: EpisodeRunner, rows: list[Row], generator: Generators, watch: Watch | None
    ) -> None:
        eos = eos_ids(runner.model, runner.tokenizer)
        self.rules = Rules(runner.text, eos, runner.retriever, runner.protocol, runner.limits, watch)
        self.sampling = runner.sampling
        self.rows = rows
        self._waiting: list[Row] = []
        self._decoder = Decoder(runner.model, pad_id(runner.tokenizer))
        self._generator = generator
        self._first = rows[0].number
        self._size = len(rows)

    def run(self) -> None:
        logits = self._decoder.start([row.prompt_ids for row in self.rows])
        while True:
            self._act(logits)
            self.rules.respond(self.rows)
            keep = [place for place, row in enumerate(self.rows) if row.stop is None]
            if not keep:
                return
            self.rows = [self.rows[place] for place in keep]
            logits = self._decoder.extend(keep, [row.prompt_ids + row.response_ids for row in self.rows])

    def _act(self, logits: Tensor) -> None:
        """Let every row write one action."""
        for row in self.rows:
            self.rules.begin(row)
        live = list(range(len(self.rows)))
        while True:
            tokens, logprobs = sample(logits, self.sampling, self._draw(live))
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

    def _draw(self, live: Sequence[int]) -> Tensor | None:
        """Return one random number per row still here.

        Of one generator as many are drawn as the batch had rows, so what a row draws doesn't depend on which
        others have ended. A generator of the row's own is only asked when the row writes.
        """
        if self.sampling.greedy:
            return None
        if not isinstance(self._generator, Sequence):
            return draw_uniform(self._size, self._generator)[[row.number - self._first for row in self.rows]]
        drawn = torch.zeros(len(self.rows))
        for place in live:
            drawn[place] = draw_uniform(1, self._generator[self.rows[place].number])[0]
        return drawn

    def _write(self, live: list[int], tokens: list[int], logprobs: list[float]) -> set[int]:
        """Append its token to each live row. Returns the places whose action it ended."""
        take = self.rules.take
        return {place for place in live if take(self.rows[place], tokens[place], logprobs[place])}


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
