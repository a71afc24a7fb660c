"""The organism acts: all rows write together, the tool answers in between, until each has given its answer.

A row writes until it closes a search or its answer, or the length limit. The feedback of a search is put into
its next tokens and is not the policy's (0 in ``mask``). Rows are scored by exact match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llds.lab.organism import Cache, Organism
from llds.lab.world import (
    ANSWER,
    ANSWER_END,
    FEEDBACK_LENGTH,
    INFO,
    INFO_END,
    NOTHING,
    PAD,
    SEARCH,
    SEARCH_END,
    Questions,
    World,
)

Array: TypeAlias = NDArray[np.int64]

#: A batch with a smaller share of rows still writing is narrowed to those.
_WORTH_NARROWING = 0.6


@dataclass(frozen=True)
class Rollout:
    """Responses side by side; B = questions × group size, the rows of a group lie together.

    ``ids`` [B, P + T]: prompt, response, padding. ``mask`` [B, T]: 1 where the policy wrote. ``answer_mask``
    [B, T]: 1 on the final answer with its tags. ``rewards`` [B]. ``searches``, ``malformed`` [B]: searches
    made, and those that were no query. ``first_query``: per row what it searched for first, None without a
    search. ``answered`` [B]: whether it gave an answer.
    """

    ids: Tensor
    mask: Tensor
    answer_mask: Tensor
    rewards: Tensor
    searches: Tensor
    malformed: Tensor
    first_query: list[tuple[int, ...] | None]
    answered: Tensor


@dataclass(frozen=True)
class Limits:
    """``max_response``: tokens of a response, feedback included. ``max_searches``: one more ends the response."""

    max_response: int = 40
    max_searches: int = 4


class _Rows:
    """What is known of each row while it writes."""

    def __init__(self, count: int, length: int) -> None:
        self.ids = np.full((count, length), PAD, np.int64)
        self.mask = np.zeros((count, length), np.int64)
        self.searches = np.zeros(count, np.int64)
        self.malformed = np.zeros(count, np.int64)
        self.first_query: list[tuple[int, ...] | None] = [None] * count
        self.feedback = np.zeros((count, FEEDBACK_LENGTH), np.int64)
        self.owed = np.zeros(count, np.int64)
        self.is_done = np.zeros(count, bool)


@torch.no_grad()
def roll_out(
    model: Organism,
    world: World,
    questions: Questions,
    group_size: int,
    limits: Limits,
    sampling: torch.Generator,
    draw: np.random.Generator,
) -> Rollout:
    """Let ``model`` answer each question ``group_size`` times, at temperature 1.

    ``sampling`` draws tokens, ``draw`` the tool's noise: the same states give the same responses.
    """
    prompts = np.repeat(world.prompts(questions), group_size, axis=0)
    rows = _Rows(len(prompts), limits.max_response)
    live = np.arange(len(prompts))
    cache = Cache(model.body, len(prompts))
    logits = model.read(torch.from_numpy(prompts), cache)
    for place in range(limits.max_response):
        tokens = _write(logits, rows, live, place, sampling)
        for row in live[(tokens == SEARCH_END) & (rows.mask[live, place] == 1)]:
            _search(world, rows, int(row), place, limits.max_searches, draw)
        rows.is_done[live[(tokens == ANSWER_END) & (rows.mask[live, place] == 1)]] = True
        active = ~rows.is_done[live]
        if not active.any() or place + 1 == limits.max_response:
            break
        if active.mean() < _WORTH_NARROWING:
            cache.keep(torch.from_numpy(np.flatnonzero(active)))
            live, tokens = live[active], tokens[active]
        logits = model.read(torch.from_numpy(tokens).unsqueeze(1), cache)
    return _scored(prompts, rows, np.repeat(world.first_entity + questions.gold, group_size))


def _write(logits: Tensor, rows: _Rows, live: Array, place: int, sampling: torch.Generator) -> Array:
    """Draw the next token of every live row, or take it from the feedback it is owed; write it down."""
    drawn = _sample(logits, sampling)
    owed = rows.owed[live]
    tokens = np.where(owed > 0, rows.feedback[live, FEEDBACK_LENGTH - np.maximum(owed, 1)], drawn)
    is_open = ~rows.is_done[live]
    rows.ids[live[is_open], place] = tokens[is_open]
    rows.mask[live, place] = is_open & (owed == 0)
    rows.owed[live] = np.maximum(owed - 1, 0)
    return tokens


def _sample(logits: Tensor, sampling: torch.Generator) -> Array:
    """Draw one token of each row by inverting its cumulative distribution, far faster than multinomial."""
    cumulative = logits.softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, torch.rand(total.shape, generator=sampling) * total, right=True)
    # Rounding may lift the product to the total itself, behind the last token.
    drawn: Array = chosen.squeeze(1).clamp(max=logits.shape[1] - 1).numpy()
    return drawn


def _search(
    world: World, rows: _Rows, row: int, place: int, max_searches: int, draw: np.random.Generator
) -> None:
    """Let the tool answer the query that ends at ``place``, or end a row that has no search left."""
    if rows.searches[row] == max_searches:
        rows.is_done[row] = True
        return
    before = slice(max(0, place - 3), place)
    query, wrote = rows.ids[row, before].tolist(), rows.mask[row, before]
    is_query = len(query) == 3 and query[0] == SEARCH and wrote.all()
    found = world.look_up(query[1], query[2], draw) if is_query else NOTHING
    if rows.searches[row] == 0:
        rows.first_query[row] = tuple(query[1:])
    rows.searches[row] += 1
    rows.malformed[row] += found == NOTHING
    rows.feedback[row] = (INFO, found, INFO_END)
    rows.owed[row] = FEEDBACK_LENGTH


def _scored(prompts: Array, rows: _Rows, gold: Array) -> Rollout:
    """Score each row, and turn it all into tensors of the length of the longest row."""
    length = int((rows.ids != PAD).any(0).nonzero()[0].max()) + 1
    ids, mask = rows.ids[:, :length], rows.mask[:, :length]
    answered = (ids == ANSWER_END) & (mask == 1)
    place = np.where(answered.any(1), answered.argmax(1), -1)[:, None] - np.arange(length)
    in_answer = (place >= 0) & (place < 3) & (mask == 1)
    is_formed = (in_answer & (place == 2) & (ids == ANSWER)).any(1)
    is_right = is_formed & (in_answer & (place == 1) & (ids == gold[:, None])).any(1)
    return Rollout(
        torch.from_numpy(np.concatenate([prompts, ids], axis=1)),
        torch.from_numpy(mask),
        torch.from_numpy((in_answer & is_formed[:, None]).astype(np.int64)),
        torch.from_numpy(is_right.astype(np.float32)),
        torch.from_numpy(rows.searches),
        torch.from_numpy(rows.malformed),
        rows.first_query,
        torch.from_numpy(is_formed),
    )
