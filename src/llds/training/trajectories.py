"""A sample of responses per optimizer step: text, per-token likelihoods before and after, gates of LLDS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from llds.data.questions import Question
from llds.search.episode import Episode
from llds.search.protocol import Answer, Search
from llds.training.recipe import LLDSSettings

# An |advantage| up to this counts as 0, as in the loss.
_TOLERANCE = 1e-3


class TrajectorySampler:
    """Watches a trainer's micro-batches and keeps the first responses of each optimizer step."""

    def __init__(self, count: int, settings: LLDSSettings, tokenizer: Any) -> None:
        self._count = count
        self._settings = settings
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, ...], tuple[Episode, Question, float]] = {}
        self._rows: list[dict[str, Any]] = []

    def learn(
        self, episodes: Sequence[Episode], questions: Sequence[Question], rewards: Sequence[float]
    ) -> None:
        """Take note of a rollout, so that responses can be recognised by their tokens."""
        self._known = {
            _key(one.prompt_ids, one.response_ids): (one, question, reward)
            for one, question, reward in zip(episodes, questions, rewards, strict=True)
        }

    def observe(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, inputs: dict[str, Any]
    ) -> None:
        """Look at one micro-batch: tensors [B, T], ``advantages`` [B]; an observer of ``LLDSRuntime``."""
        for row in range(min(self._count - len(self._rows), mask.shape[0])):
            length = int(inputs["completion_mask"][row].sum())
            prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
            response = inputs["completion_ids"][row, :length].tolist()
            found = self._known.get(_key(prompt, response))
            if found is not None:
                new, old = (part[row, :length].float().tolist() for part in (logprobs, old_logprobs))
                self._rows.append(
                    describe(*found, float(advantages[row]), new, old, self._settings, self._tokenizer)
                )

    def take(self) -> list[dict[str, Any]]:
        """Return the rows of the optimizer step that just ended, and begin the next."""
        rows, self._rows = self._rows, []
        return rows


def describe(
    episode: Episode,
    question: Question,
    reward: float,
    advantage: float,
    logprobs: Sequence[float],
    old_logprobs: Sequence[float],
    settings: LLDSSettings,
    tokenizer: Any,
) -> dict[str, Any]:
    """Return one response as a JSON row.

    ``spans``: actions and what was fed back, in order, each with its text, its tokens ``[start, end)`` within
    the response, and for actions ``displacement`` (nats, summed; positive when the action became less likely)
    and ``gate_open``. ``tokens``, ``logprobs``, ``old_logprobs``: one entry per response token, nats.
    """
    drops = [old - new for old, new in zip(old_logprobs, logprobs, strict=True)]
    return {
        "question_id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        "answer": episode.answer,
        "stop": episode.stop,
        "reward": reward,
        "advantage": advantage,
        "prompt": tokenizer.decode(episode.prompt_ids),
        "spans": _spans(episode, drops, advantage, settings),
        "tokens": [tokenizer.decode([token]) for token in episode.response_ids],
        "response_mask": list(episode.response_mask),
        "logprobs": list(logprobs),
        "old_logprobs": list(old_logprobs),
    }


def _spans(
    episode: Episode, drops: Sequence[float], advantage: float, settings: LLDSSettings
) -> list[dict[str, Any]]:
    nonnegative = advantage > _TOLERANCE or (settings.preserve == "nonnegative" and advantage >= -_TOLERANCE)
    # Of a failed episode no token is in the loss.
    preserved = nonnegative and not episode.tool_failed
    whole = sum(_drop(drops, turn.start, turn.end, settings) for turn in episode.turns) > 0
    starts = [turn.start for turn in episode.turns[1:]] + [len(episode.response_ids)]
    spans: list[dict[str, Any]] = []
    for turn, following in zip(episode.turns, starts, strict=True):
        fell = _drop(drops, turn.start, turn.end, settings) > 0
        open_gate = {"action": fell, "response": whole, "token": True}[settings.gate]
        spans.append(
            {
                "kind": _kind(turn.action),
                "text": turn.text,
                "start": turn.start,
                "end": turn.end,
                "displacement": sum(drops[turn.start : turn.end]),
                "gate_open": preserved and open_gate,
            }
        )
        if following > turn.end:
            kind = "correction" if turn.passages is None else "information"
            spans.append({"kind": kind, "text": turn.observation, "start": turn.end, "end": following})
    return spans


def _drop(drops: Sequence[float], start: int, end: int, settings: LLDSSettings) -> float:
    return sum(drops[start:end]) - settings.dead_zone * (end - start)


def _kind(action: object) -> str:
    return "search" if isinstance(action, Search) else "answer" if isinstance(action, Answer) else "malformed"


def _key(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> tuple[int, ...]:
    return (*prompt_ids, -1, *response_ids)
