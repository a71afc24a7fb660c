"""The rules of an episode, whoever writes its actions: what an action means, what is fed back, when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from llds.errors import LLDSError
from llds.search.passages import Passage
from llds.search.protocol import (
    CORRECTION,
    OBSERVATION_CLOSE,
    STOP_STRINGS,
    Answer,
    Malformed,
    Protocol,
    Search,
    parse_action,
)
from llds.search.retrieval import Retriever, RetrieverUnavailable, search_checked
from llds.search.tokens import TokenText
from llds.search.trajectory import Episode, Event, Limits, Stop, Turn

Watch: TypeAlias = Callable[[Event], None]


@dataclass
class Row:
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
        """The tokens of the present action so far."""
        return self.response_ids[self.begin :]

    def append(self, ids: Sequence[int], logprobs: Sequence[float], by_policy: bool) -> None:
        """Add tokens to the response."""
        self.response_ids += ids
        self.logprobs += logprobs
        self.response_mask += [int(by_policy)] * len(ids)

    def episode(self) -> Episode:
        """Return the episode, which is over."""
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


class Rules:
    """Leads rows through their episodes.

    For every action: :meth:`begin`, then :meth:`take` its tokens until one ends it; :meth:`respond` to all that
    have acted. ``eos``: the tokens that end a sequence. ``watch`` is told what happens. Raises
    :class:`LLDSError` when the limits leave no room for an observation.
    """

    def __init__(
        self,
        text: TokenText,
        eos: frozenset[int],
        retriever: Retriever,
        protocol: Protocol,
        limits: Limits,
        watch: Watch | None = None,
    ) -> None:
        self.text, self.eos, self.watch = text, eos, watch
        self.retriever, self.protocol, self.limits = retriever, protocol, limits
        check_room(text, limits)

    def begin(self, row: Row) -> None:
        """Let ``row`` begin an action."""
        row.begin = row.shown = len(row.response_ids)
        row.limit = min(row.begin + self.limits.max_action_tokens, self.limits.max_response_tokens)

    def take(self, row: Row, token: int, logprob: float) -> bool:
        """Append a token that the policy wrote. Returns whether it ended the action, which is then read."""
        row.append([token], [logprob], by_policy=True)
        over = token in self.eos or len(row.response_ids) >= row.limit
        over = over or self.text.completes_tag(row.action_ids)
        if self.watch:
            self._show(row, over)
        if over:
            self.finish_action(row)
        return over

    def finish_action(self, row: Row) -> None:
        """Read the action that ``row`` has just written, and end its episode where no feedback may follow."""
        ids = row.action_ids
        ended = bool(ids) and ids[-1] in self.eos
        written = ids[:-1] if ended else ids
        text = self.text.decode(written)
        action = parse_action(text)
        cut = (
            len(row.response_ids) >= row.limit and not ended and not any(tag in text for tag in STOP_STRINGS)
        )
        row.turns.append(Turn(action, text, row.begin, row.begin + len(ids), cut=cut))
        gave_up = isinstance(action, Malformed) and ended
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

    def respond(self, rows: Sequence[Row]) -> None:
        """Give every row that goes on its search results or its correction; one call retrieves for all."""
        searching: list[tuple[Row, str]] = []
        for row in rows:
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
            row.turns[-1] = replace(row.turns[-1], passages=tuple(passages))
            ids = observation_ids(self.text, self.protocol, self.limits, passages, query)
            self._report("observation", row, self._feed(row, ids), tuple(passages))

    def _feed(self, row: Row, ids: list[int]) -> str:
        """Append feedback to ``row``, or end its episode for want of room. Returns what was fed."""
        if len(row.response_ids) + len(ids) >= self.limits.max_response_tokens:
            row.stop = "length"
            return ""
        row.append(ids, [0.0] * len(ids), by_policy=False)
        text = self.text.decode(ids)
        row.turns[-1] = replace(row.turns[-1], observation=text)
        return text

    def _show(self, row: Row, over: bool) -> None:
        """Report what the row's last tokens wrote, as soon as it is whole characters."""
        ids = [token for token in row.action_ids if token not in self.eos]
        before = self.text.decode(ids[: row.shown - row.begin])
        text = self.text.decode(ids)
        if over or not text.endswith("\ufffd"):
            row.shown = row.begin + len(ids)
            self._report("token", row, text[len(before) :])

    def _report(self, kind: Any, row: Row, text: str, passages: tuple[Passage, ...] = ()) -> None:
        if self.watch and (text or kind in ("search", "answer")):  # else nothing was written or fed
            self.watch(Event(kind, row.number, text, passages))


def observation_ids(
    text: TokenText, protocol: Protocol, limits: Limits, passages: Sequence[Passage], query: str
) -> list[int]:
    """Return the tokens that show ``passages``, cut to the longest observation with its closing tag kept."""
    ids = text.encode(protocol.format_observation(passages, query))
    if len(ids) > limits.max_observation_tokens:
        closing = text.encode(OBSERVATION_CLOSE)
        ids = ids[: limits.max_observation_tokens - len(closing)] + closing
    return ids


def check_room(text: TokenText, limits: Limits) -> None:
    """Raise :class:`LLDSError` when the limits leave no room for an observation."""
    closing = len(text.encode(OBSERVATION_CLOSE))
    if limits.max_observation_tokens <= closing:
        raise LLDSError(
            f"max_observation_tokens is {limits.max_observation_tokens}, but the closing tag alone "
            f"has {closing} tokens: raise the limit."
        )


def check_prompt(number: int, ids: Sequence[int], limits: Limits, positions: int | None) -> None:
    """Raise :class:`LLDSError` for a prompt that is empty or too long, for the limits or the model.

    ``positions``: the longest context of the model in tokens; None when it is not known.
    """
    if not ids:
        raise LLDSError(f"Prompt {number} has no tokens: give it some text.")
    if len(ids) > limits.max_prompt_tokens:
        raise LLDSError(
            f"Prompt {number} has {len(ids)} tokens, more than max_prompt_tokens={limits.max_prompt_tokens}: "
            "raise the limit or shorten the question."
        )
    if positions is not None and len(ids) + limits.max_response_tokens > positions:
        raise LLDSError(
            f"Prompt {number} ({len(ids)} tokens) and a response of up to {limits.max_response_tokens} tokens "
            f"exceed the model's {positions} positions: lower max_response_tokens."
        )
