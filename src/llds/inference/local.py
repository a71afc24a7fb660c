"""transformers in this process, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from llds.inference.engine import Finished, Game
from llds.search.episode import EpisodeRunner
from llds.search.sampling import Sampling


class TransformersEngine:
    """Plays episodes ``batch`` side by side. ``arithmetic``: the context in which the model computes."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        batch: int,
        arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.tokenizer = tokenizer
        self.positions = getattr(model.config, "max_position_embeddings", None)
        self.batch = batch
        self._model = model
        self._arithmetic = arithmetic

    def play(
        self, prompts: Sequence[Sequence[int]], game: Game, sampling: Sampling, seeds: Sequence[int]
    ) -> Generator[Finished]:
        """See :class:`~llds.inference.engine.Engine`. Yields batch by batch, in order."""
        runner = EpisodeRunner(
            self._model, self.tokenizer, game.retriever, game.protocol, game.limits, sampling
        )
        for first in range(0, len(prompts), self.batch):
            numbers = range(first, min(first + self.batch, len(prompts)))
            generators = [torch.Generator().manual_seed(seeds[number]) for number in numbers]
            with self._arithmetic():
                episodes = runner.run([prompts[number] for number in numbers], generator=generators)
            yield list(zip(numbers, episodes, strict=True))
