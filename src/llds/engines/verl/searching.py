"""The settings of search episodes in verl, and the search tool that the episodes of one process share.

The names are those of the recipes of ``llds train``. Plain data: verl is not needed.
"""

from __future__ import annotations

import difflib
import functools
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, get_args

from llds.errors import LLDSError
from llds.objective.checks import check_above, check_choice, check_least
from llds.retrieval.opening import Mode
from llds.retrieval.tool import EMBEDDED, open_corpus, open_server
from llds.search.protocol import PromptStyle, Protocol
from llds.search.retrieval import Retriever, for_threads
from llds.search.trajectory import Limits

logger = logging.getLogger("llds.engines.verl")

#: Name of the agent loop, and of the section with its settings in verl's configuration.
NAME = "llds_search"

_WHOLE = ("max_turns", "max_action", "max_observation", "passage_words", "topk", "tries", "cache")
_NUMBERS = ("timeout", "deadline")
_TEXTS = ("corpus", "url", "token_file")
_NO_TEXT = ("url", "token_file")
_SEARCHES_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The shape of an episode and the tool it searches with.

    ``prompt``: how the messages of a row become tokens. ``search-r1-instruct`` puts them through the tokenizer's
    chat template; with ``search-r1`` and ``short`` the row has one message, whose text is the prompt as it
    stands. ``max_turns``: searches (or corrections) answered per episode; one last action may follow.
    ``max_action``, ``max_observation``: tokens of one action, of one search result. ``passage_words``: words shown
    of each passage; 0 shows all. ``correct_eos``: an action that ends without search or answer gets the
    correction.

    ``url``: a retrieval server; without one ``corpus`` is searched in this process, ``mode`` says how an index
    folder is. ``topk``: passages per search. ``token_file``, ``timeout`` (seconds), ``tries``, ``deadline``
    (seconds), ``cache`` (answers): as in :class:`~llds.search.remote.HTTPRetriever`.

    Raises :class:`LLDSError` for a value that can't be meant.
    """

    prompt: PromptStyle = "search-r1-instruct"
    max_turns: int = 4
    max_action: int = 500
    max_observation: int = 500
    passage_words: int = 0
    correct_eos: bool = True
    corpus: str = EMBEDDED
    mode: Mode = "auto"
    url: str | None = None
    token_file: str | None = None
    topk: int = 3
    timeout: float = 30.0
    tries: int = 8
    deadline: float = 120.0
    cache: int = 20_000

    def __post_init__(self) -> None:
        check_choice(get_args(PromptStyle), prompt=self.prompt)
        check_choice(get_args(Mode), mode=self.mode)
        for name in _WHOLE:
            _check_kind(name, getattr(self, name), (int,), "a whole number")
        for name in _NUMBERS:
            _check_kind(name, getattr(self, name), (int, float), "a number")
        for name in _TEXTS:
            if not (name in _NO_TEXT and getattr(self, name) is None):
                _check_kind(name, getattr(self, name), (str,), "text")
        if not isinstance(self.correct_eos, bool):
            raise LLDSError(f"correct_eos must be true or false, but is {self.correct_eos!r}.")
        check_least(0, max_turns=self.max_turns, passage_words=self.passage_words, cache=self.cache)
        check_least(1, max_action=self.max_action, max_observation=self.max_observation)
        check_least(1, topk=self.topk, tries=self.tries)
        check_above(0, timeout=self.timeout, deadline=self.deadline)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> SearchOptions:
        """Read settings as they stand in YAML.

        Raises :class:`LLDSError`, with the section's name, for an unknown name or a value that can't be meant.
        """
        known = [item.name for item in fields(cls)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
                raise LLDSError(f"{NAME} has no setting {name}: {hint}")
        try:
            return cls(**settings)
        except LLDSError as error:
            raise LLDSError(f"{NAME}.{error}") from None

    def protocol(self) -> Protocol:
        """Return the wording of the episodes."""
        return Protocol(
            style=self.prompt,
            topk=self.topk,
            snippet_words=self.passage_words or None,
            correct_eos=self.correct_eos,
        )

    def limits(self, max_prompt: int, max_response: int) -> Limits:
        """Return how far an episode may go; prompt and response, in tokens, are limited by verl's settings."""
        return Limits(
            max_turns=self.max_turns,
            max_action_tokens=self.max_action,
            max_observation_tokens=self.max_observation,
            max_response_tokens=max_response,
            max_prompt_tokens=max_prompt,
        )


def open_tool(options: SearchOptions) -> Retriever:
    """Return the search tool, tried out; raises :class:`LLDSError` when it can't be used."""
    if options.url is None:
        return open_corpus(options.corpus, options.mode, section=f"{NAME}.")
    return open_server(
        options.url,
        timeout=options.timeout,
        tries=options.tries,
        deadline=options.deadline,
        cache=options.cache,
        token_file=options.token_file,
        on_event=_tell,
    )


_opening = threading.Lock()
_opened: dict[SearchOptions, Retriever] = {}


def shared_tool(options: SearchOptions) -> Retriever:
    """Return :func:`open_tool`'s answer, the same one for all episodes of this process. Threads may ask at once."""
    with _opening:
        if options not in _opened:
            _opened[options] = for_threads(open_tool(options))
        return _opened[options]


@functools.cache
def search_threads() -> ThreadPoolExecutor:
    """Return the threads in which searches wait: verl's own must stay free when a server is slow."""
    return ThreadPoolExecutor(_SEARCHES_AT_ONCE, thread_name_prefix=NAME)


def _tell(kind: str, details: Mapping[str, Any]) -> None:
    told = ", ".join(f"{name}={value}" for name, value in details.items())
    logger.warning("LLDS: %s (%s)", kind.replace("_", " "), told)


def _check_kind(name: str, value: Any, kinds: tuple[type, ...], wanted: str) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise LLDSError(f"{name} must be {wanted}, but is {value!r}.")
