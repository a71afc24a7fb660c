"""Client of Search-R1's retrieval server.

``POST {"queries": [...], "topk": k, "return_scores": true}`` is answered by
``{"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}]]}``, one list per query.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from llds.errors import LLDSError
from llds.search.passages import Passage
from llds.search.resilience import Backoff, Breaker, Cache
from llds.search.transport import GivenUp, Patience, TooLong, Transport, told_by

OnEvent: TypeAlias = Callable[[str, dict[str, Any]], None]
"""``(kind, details)``; see :class:`HTTPRetriever`."""

TOKEN_VARIABLE = "LLDS_RETRIEVAL_TOKEN"
_LONGEST_ANSWER = 256 << 20  # bytes


class RetrieverUnavailable(LLDSError):  # noqa: N818 - a state, named as callers speak of it
    """The search tool is out of order. Its episodes are left out, never rewarded with 0."""


class HTTPRetriever:
    """Search through a server that speaks Search-R1's protocol. Threads may share one.

    ``url``: the whole address, e.g. ``http://host:8000/retrieve``. ``timeout``: seconds to wait for a
    connection, and then between any two bytes of the answer. ``tries``: how often one request is sent
    before :class:`RetrieverUnavailable` is raised; refused and broken connections, timeouts, and the
    statuses 429 and 5xx are tried again, anything else is not. ``backoff``: the longest pause before the
    second try in seconds, doubled for each further one up to ``longest_pause``; each pause is drawn evenly
    from 0 to that (full jitter), and is at least what the server's Retry-After asks for, within the same
    bound. ``deadline``: seconds for one search with all its tries and pauses; None for no limit.
    ``token``: shown to the server as a bearer token. ``cache``: answers kept, by query and topk, the ones
    used last. ``batch``: queries sent in one request. ``breaker``: after so many failed searches in a row
    the server is left alone for ``cooldown`` seconds, and every search fails at once.

    ``on_event`` is told when the service changes: ``retriever_failing`` (the first failed try),
    ``retriever_unavailable`` (a search was given up), ``retriever_left_alone`` (the breaker opened) and
    ``retriever_recovered`` (it answers again), with details to write down.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        tries: int = 3,
        backoff: float = 0.5,
        longest_pause: float = 15.0,
        deadline: float | None = None,
        token: str | None = None,
        cache: int = 0,
        batch: int = 512,
        breaker: int = 3,
        cooldown: float = 30.0,
        on_event: OnEvent | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_url(url)
        _check_token(token)
        if timeout <= 0 or tries < 1 or backoff < 0 or longest_pause < 0:
            raise LLDSError(
                f"Retriever settings timeout={timeout}, tries={tries}, backoff={backoff}, "
                f"longest_pause={longest_pause} are out of range: "
                "timeout must be positive, tries at least 1, the others not negative."
            )
        if batch < 1 or breaker < 1 or cooldown < 0 or cache < 0 or (deadline is not None and deadline <= 0):
            raise LLDSError(
                f"Retriever settings batch={batch}, breaker={breaker}, cooldown={cooldown}, cache={cache}, "
                f"deadline={deadline} are out of range: batch and breaker must be at least 1, "
                "the deadline positive, the others not negative."
            )
        self.url = url
        self.timeout = timeout
        self.tries = tries
        self.deadline = deadline
        self.batch = batch
        self._transport = Transport(token, _LONGEST_ANSWER, clock)
        self._patience = Patience(tries, Backoff(backoff, longest_pause), deadline, sleep, clock)
        self._cache: Cache[tuple[str, int], tuple[Passage, ...]] = Cache(cache)
        self._breaker = Breaker(breaker, cooldown, clock)
        self._cooldown = cooldown
        self._outage = _Outage(url, on_event or (lambda kind, details: None), clock)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return the server's passages, at most ``topk`` per query; empty queries are not sent."""
        asked = dict.fromkeys(query for query in queries if query.strip())
        found = {query: kept for query in asked if (kept := self._cache.get((query, topk))) is not None}
        missing = [query for query in asked if query not in found]
        if missing:
            for query, passages in zip(missing, self._ask(missing, topk), strict=True):
                found[query] = tuple(passages)
                self._cache.put((query, topk), found[query])
        return [list(found.get(query, ())) for query in queries]

    def probe(self) -> None:
        """Send one small query. Raises :class:`RetrieverUnavailable` with the reason if it isn't answered."""
        self._ask(["probe"], 1)

    def _ask(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Send ``queries`` in pieces, past the breaker, and report what came of it."""
        left = self._breaker.wait()
        if left > 0:
            raise RetrieverUnavailable(
                f"The retriever at {self.url} failed again and again, so it is left alone for another "
                f"{left:.0f} s: check that it runs and is reachable."
            )
        tries = 1 if self._breaker.on_trial else self.tries
        end = self._patience.end()
        try:
            pieces = [queries[first : first + self.batch] for first in range(0, len(queries), self.batch)]
            found = [passages for piece in pieces for passages in self._insist(piece, topk, tries, end)]
        except RetrieverUnavailable as error:
            opened = self._breaker.failed()
            self._outage.given_up(str(error), len(queries), self._cooldown if opened else None)
            raise
        except BaseException:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        self._outage.over()
        return found

    def _insist(self, queries: list[str], topk: int, tries: int, end: float | None) -> list[list[Passage]]:
        """Send one request until it is answered, or the tries or the time are used up."""
        try:
            return self._patience.insist(
                lambda: self._post(queries, topk, end), end, tries, self._outage.failing
            )
        except GivenUp as error:
            raise RetrieverUnavailable(
                f"The retriever at {self.url} {error}: check that it runs and is reachable."
            ) from error

    def _post(self, queries: list[str], topk: int, end: float | None) -> list[list[Passage]]:
        body = {"queries": queries, "topk": topk, "return_scores": True}
        try:
            status, content = self._transport.send(self.url, body, timeout=self.timeout, end=end)
        except TooLong:
            raise RetrieverUnavailable(
                f"The retriever at {self.url} answered with more than {_LONGEST_ANSWER >> 20} MiB: "
                "check that the address is right."
            ) from None
        if status != 200:
            raise RetrieverUnavailable(_refusal(self.url, status, content))
        try:
            return _read(json.loads(content), len(queries), topk)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RetrieverUnavailable(
                f"The retriever at {self.url} answered in another form than Search-R1's ({error}): "
                'it must send {"result": [[{"document": {"id", "contents"}, "score"}]]}, one list per query.'
            ) from error


class _Outage:
    """Tells of the beginning and the end of a time of failures."""

    def __init__(self, url: str, on_event: OnEvent, clock: Callable[[], float]) -> None:
        self._url = url
        self._tell = on_event
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._given_up = 0

    def failing(self, reason: str) -> None:
        with self._lock:
            if self._since is not None:
                return
            self._since, self._given_up = self._clock(), 0
        self._tell("retriever_failing", {"url": self._url, "reason": reason})

    def given_up(self, reason: str, queries: int, left_alone: float | None) -> None:
        with self._lock:
            self._since = self._clock() if self._since is None else self._since
            self._given_up += 1
        self._tell("retriever_unavailable", {"url": self._url, "queries": queries, "reason": reason})
        if left_alone is not None:
            self._tell("retriever_left_alone", {"url": self._url, "seconds": left_alone})

    def over(self) -> None:
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            seconds = round(self._clock() - since, 3)
            details = {"url": self._url, "seconds": seconds, "searches_given_up": self._given_up}
            self._tell("retriever_recovered", details)


def read_token(file: str | os.PathLike[str] | None) -> str | None:
    """Return the token in ``file``; without one that of ``$LLDS_RETRIEVAL_TOKEN``, or None.

    Raises :class:`LLDSError` when the file can't be read or is empty.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LLDSError(f"The token file {file} can't be read ({error}): check its path.") from error
    if not token:
        raise LLDSError(f"The token file {file} is empty: write the token into it, on one line.")
    return token


def _check_url(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise LLDSError(f"Retriever address {url!r} is not a URL: write e.g. http://127.0.0.1:8000/retrieve.")


def _check_token(token: str | None) -> None:
    if token is not None and (not token.strip() or not token.isascii() or not token.isprintable()):
        raise LLDSError("The retriever's token must be visible ASCII characters on one line: check its file.")


def _refusal(url: str, status: int, content: bytes) -> str:
    if status in (401, 403):
        return (
            f"The retriever at {url} refused the request with status {status}: it wants another token; "
            f"set {TOKEN_VARIABLE} or retrieval.token_file."
        )
    detail = told_by(content)
    told = f' ("{detail}")' if detail else ""
    return (
        f"The retriever at {url} refused the request with status {status}{told}: check "
        "the path of its address and that it speaks Search-R1's protocol."
    )


def _read(answer: Any, queries: int, topk: int) -> list[list[Passage]]:
    results = answer["result"]
    if not isinstance(results, list) or len(results) != queries:
        count = len(results) if isinstance(results, list) else "no"
        raise ValueError(f"{count} results for {queries} queries")
    return [[_passage(item) for item in result[:topk]] for result in results]


def _passage(item: Any) -> Passage:
    document = item["document"]
    contents = document["contents"]
    if not isinstance(contents, str):
        raise TypeError("contents is not text")
    # Half of a surrogate pair can be written in JSON, and read by nothing that comes after.
    id_, text = (part.encode("utf-8", "replace").decode() for part in (str(document.get("id", "")), contents))
    return Passage.from_contents(id_, text, float(item.get("score") or 0.0))
