"""The contract of an inference engine."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from llds.search.protocol import Protocol as Wording
from llds.search.retrieval import Retriever
from llds.search.sampling import Sampling
from llds.search.trajectory import Episode, Limits

Finished: TypeAlias = list[tuple[int, Episode]]
"""Episodes that ended, each with the number of its prompt."""


@dataclass(frozen=True)
class Game:
    """What is played: the search tool, the wording and the limits of the episodes."""

    retriever: Retriever
    protocol: Wording
    limits: Limits


class Engine(Protocol):
    """Plays episodes with one model.

    ``tokenizer``: that of the model, from transformers. ``positions``: the longest context in tokens, None when
    it is not known. ``batch``: episodes that are played side by side and influence each other's rounding; 1 when
    they don't.
    """

    tokenizer: Any
    positions: int | None
    batch: int

    def play(
        self, prompts: Sequence[Sequence[int]], game: Game, sampling: Sampling, seeds: Sequence[int]
    ) -> Generator[Finished]:
        """Play one episode per prompt; yield them as they end, in any order, each once.

        ``prompts``: token ids. ``seeds``: one per prompt, from 0 to 2**63 - 1; an episode that is sampled depends
        on no other random number. Closing the generator stops it. Raises :class:`~llds.errors.LLDSError` for a
        prompt that is empty or too long, and when the engine fails.
        """
        ...
