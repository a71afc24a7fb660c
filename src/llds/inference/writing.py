"""Episodes whose actions are written elsewhere: by vLLM in this process, or by a server.

A :class:`Writer` is given contexts and writes the next action of each. What an action means, what is fed back
and when it is over is decided by :class:`~llds.search.rules.Rules`, as for transformers.
"""

from __future__ import annotations

import hashlib
import math
import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llds.errors import LLDSError
from llds.inference.engine import Finished, Game
from llds.search.retrieval import for_threads
from llds.search.rules import Row, Rules, check_prompt
from llds.search.sampling import Sampling
from llds.search.tokens import TokenText
from llds.search.trajectory import Episode


@dataclass(frozen=True)
class Context:
    """What to go on from. ``ids``: prompt and response so far. ``seed``: of this action alone."""

    ids: list[int]
    max_tokens: int
    seed: int


class Writer(Protocol):
    """Writes the next action of an episode."""

    def write(self, contexts: Sequence[Context], sampling: Sampling) -> list[list[int]]:
        """Return for every context the tokens of one action.

        It ends with the token that completes ``</search>`` or ``</answer>``, with an end-of-sequence token, or
        after ``max_tokens``; whatever comes behind is cut off. Raises :class:`~llds.errors.LLDSError` when the
        engine fails.
        """
        ...


def play_rows(
    rows: Sequence[Row], writer: Writer, rules: Rules, sampling: Sampling, seeds: Sequence[int]
) -> None:
    """Lead ``rows`` through their episodes, turn by turn. ``seeds``: one per row.

    Their ``logprobs`` are NaN where the policy wrote: the engine that sampled may have others than the trainer.
    """
    seed_of = {row.number: seed for row, seed in zip(rows, seeds, strict=True)}
    live = list(rows)
    while live:
        for row in live:
            rules.begin(row)
        contexts = [
            Context(
                row.prompt_ids + row.response_ids,
                row.limit - row.begin,
                turn_seed(seed_of[row.number], len(row.turns)),
            )
            for row in live
        ]
        for row, ids in zip(live, writer.write(contexts, sampling), strict=True):
            if not any(rules.take(row, token, math.nan) for token in ids):
                rules.finish_action(row)
        rules.respond(live)
        live = [row for row in live if row.stop is None]


def turn_seed(seed: int, turn: int) -> int:
    """Return a seed for one action, from 0 to 2**31 - 1, the most that all servers take."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[:4], "big") >> 1


class BatchedEngine:
    """Plays ``batch`` episodes at a time with a writer that is quickest with many contexts at once."""

    def __init__(
        self, writer: Writer, tokenizer: Any, eos: frozenset[int], positions: int | None, batch: int
    ) -> None:
        check_eos(eos)
        self.tokenizer, self.positions, self.batch = tokenizer, positions, batch
        self._writer, self._eos, self._text = writer, eos, TokenText(tokenizer)

    def play(
        self, prompts: Sequence[Sequence[int]], game: Game, sampling: Sampling, seeds: Sequence[int]
    ) -> Generator[Finished]:
        """See :class:`~llds.inference.engine.Engine`. Yields batch by batch, in order."""
        rules = Rules(self._text, self._eos, game.retriever, game.protocol, game.limits)
        rows = _rows(prompts, game, self.positions)
        for first in range(0, len(rows), self.batch):
            part = rows[first : first + self.batch]
            play_rows(part, self._writer, rules, sampling, seeds[first : first + self.batch])
            yield [(row.number, row.episode()) for row in part]


class ConcurrentEngine:
    """Plays ``workers`` episodes at a time, each at its own pace, with a writer that threads may share."""

    batch = 1

    def __init__(
        self, writer: Writer, tokenizer: Any, eos: frozenset[int], positions: int | None, workers: int
    ) -> None:
        check_eos(eos)
        if workers < 1:
            raise LLDSError(f"{workers} episodes can't be played side by side: give at least 1.")
        self.tokenizer, self.positions = tokenizer, positions
        self._writer, self._eos, self._workers = writer, eos, workers

    def play(
        self, prompts: Sequence[Sequence[int]], game: Game, sampling: Sampling, seeds: Sequence[int]
    ) -> Generator[Finished]:
        """See :class:`~llds.inference.engine.Engine`. Yields what has ended since the last time.

        When it is closed early, requests under way are left to end by themselves; nobody waits for them.
        """
        retriever = for_threads(game.retriever)
        waiting: queue.SimpleQueue[Row] = queue.SimpleQueue()
        for row in _rows(prompts, game, self.positions):
            waiting.put(row)
        done: queue.SimpleQueue[tuple[int, Episode] | BaseException] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            # Each thread has rules of its own, since they remember what they have seen of the vocabulary.
            text = TokenText(self.tokenizer)
            rules = Rules(text, self._eos, retriever, game.protocol, game.limits)
            try:
                while not stop.is_set():
                    row = waiting.get_nowait()
                    play_rows([row], self._writer, rules, sampling, [seeds[row.number]])
                    done.put((row.number, row.episode()))
            except queue.Empty:
                return
            except BaseException as error:
                done.put(error)

        for _ in range(min(self._workers, len(prompts))):
            # Daemons: a program that is told to stop does not wait for them.
            threading.Thread(target=work, daemon=True).start()
        try:
            left = len(prompts)
            while left:
                finished = _drain(done)
                left -= len(finished)
                yield finished
        finally:
            stop.set()


def _drain(done: queue.SimpleQueue[tuple[int, Episode] | BaseException]) -> Finished:
    """Wait for the next result and take all that are there; raise what a worker raised."""
    finished: Finished = []
    while not finished or not done.empty():
        result = done.get()
        if isinstance(result, BaseException):
            raise result
        finished.append(result)
    return finished


def _rows(prompts: Sequence[Sequence[int]], game: Game, positions: int | None) -> list[Row]:
    for number, ids in enumerate(prompts):
        check_prompt(number, ids, game.limits, positions)
    return [Row(number, list(ids), None) for number, ids in enumerate(prompts)]


def check_eos(eos: frozenset[int]) -> None:
    """Raise :class:`LLDSError` when no token ends a sequence: then an end could not be told from a cut."""
    if not eos:
        raise LLDSError("The tokenizer has no end-of-text token: name it in tokenizer_config.json.")
