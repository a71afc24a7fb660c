"""What an episode leaves behind, how far it may go, and what can be watched while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llds.errors import LLDSError
from llds.search.passages import Passage
from llds.search.protocol import Action, Search

Stop = Literal["answer", "length", "turns", "eos", "tool_failed"]


@dataclass(frozen=True)
class Limits:
    """How far an episode may go; all but ``max_turns`` in tokens.

    ``max_turns``: how many actions get feedback (search results or a correction). As in Search-R1 one last
    action follows, which may answer; a search in it is not carried out. So 4 allows 4 searches and 5
    actions. ``max_response_tokens``: actions and feedback together. Feedback that would leave no room for a
    further token is not given, and the episode ends there. ``max_observation_tokens``: a longer observation
    is cut, its closing tag is kept. ``max_prompt_tokens``: a longer prompt is an error.
    """

    max_turns: int = 4
    max_action_tokens: int = 500
    max_observation_tokens: int = 500
    max_response_tokens: int = 4096
    max_prompt_tokens: int = 2048

    def __post_init__(self) -> None:
        for name, least in {"max_turns": 0, "max_action_tokens": 1, "max_response_tokens": 1}.items():
            if getattr(self, name) < least:
                raise LLDSError(f"{name} is {getattr(self, name)}: give at least {least}.")


@dataclass(frozen=True)
class Turn:
    """One action and what came back.

    ``text``: what the policy wrote, without the end-of-sequence token. ``start``, ``end``: its tokens are
    ``response_ids[start:end]``. ``passages``: what the search found; ``None`` when none was carried out.
    ``observation``: what was fed back, as the model saw it; its tokens reach to the next turn's start.
    ``cut``: the action reached its longest length before it was whole.
    """

    action: Action
    text: str
    start: int
    end: int
    passages: tuple[Passage, ...] | None = None
    observation: str = ""
    cut: bool = False


@dataclass(frozen=True)
class Episode:
    """One finished episode.

    ``response_ids``, ``response_mask``, ``logprobs`` have one entry per response token. ``response_mask``:
    1 where the policy wrote the token, 0 on observations and corrections. ``logprobs``: nats, of the policy
    that sampled, at the sampling temperature (1 when greedy); 0.0 where the mask is 0. ``answer``: the
    final answer or ``None``. ``answer_span``: the answer lies in ``response_ids[start:end]``, tags
    included. ``stop``: why the episode ended: ``answer``; ``length`` (response limit); ``turns`` (the last
    allowed action was no answer); ``eos`` (the policy ended the sequence and got no further turn);
    ``tool_failed`` (the retriever was unavailable: leave the episode out, don't score it).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float]
    turns: list[Turn]
    answer: str | None
    answer_span: tuple[int, int] | None
    stop: Stop
    question: str | None = None

    @property
    def response(self) -> str:
        """The response as text: actions and observations in turn, without end-of-sequence tokens."""
        return "".join(turn.text + turn.observation for turn in self.turns)

    @property
    def queries(self) -> list[str]:
        """What the policy asked for, whether or not it was carried out."""
        return [turn.action.query for turn in self.turns if isinstance(turn.action, Search)]

    @property
    def searches(self) -> int:
        """The number of well-formed search actions."""
        return len(self.queries)

    @property
    def valid_searches(self) -> int:
        """The number of searches that had a query and were carried out."""
        return sum(
            isinstance(turn.action, Search) and bool(turn.action.query) and turn.passages is not None
            for turn in self.turns
        )

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens cut an action or ended the response."""
        return self.stop == "length" or any(turn.cut for turn in self.turns)

    @property
    def first_search(self) -> str | None:
        """Ids of the passages that the first answered search returned, one per line; ``None`` without one."""
        found = next((turn.passages for turn in self.turns if turn.passages is not None), None)
        return None if found is None else "\n".join(passage.id for passage in found)

    @property
    def answer_mask(self) -> list[int]:
        """One entry per response token: 1 on the final answer, tags included."""
        start, end = self.answer_span or (0, 0)
        return [int(start <= i < end) for i in range(len(self.response_ids))]

    @property
    def tool_failed(self) -> bool:
        """Whether the retriever was unavailable, so that the episode says nothing about the policy."""
        return self.stop == "tool_failed"


@dataclass(frozen=True)
class Event:
    """Something that happened while an episode ran. ``row``: which prompt, counted from 0.

    ``token``: ``text`` was written just now. ``search``: ``text`` is the query. ``observation``: ``text``
    was fed back for ``passages``. ``correction``: ``text`` was fed back for a malformed action. ``answer``:
    ``text`` is the final answer. ``tool_failed``: ``text`` says why.
    """

    kind: Literal["token", "search", "observation", "correction", "answer", "tool_failed"]
    row: int
    text: str
    passages: tuple[Passage, ...] = ()
