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

OnEvent: TypeAlias = Callable[[str, dict[str, Any]], None]
"""``(kind, details)``; see :class:`HTTPRetriever`."""

TOKEN_VARIABLE = "LLDS_RETRIEVAL_TOKEN"
_LONGEST_ANSWER = 256 << 20  # bytes
_LONGEST_SENTENCE = 200  # characters of a server's own words


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
        self._token = token
        self._pauses = Backoff(backoff, longest_pause)
        self._longest_pause = longest_pause
        self._cache: Cache[tuple[str, int], tuple[Passage, ...]] = Cache(cache)
        self._breaker = Breaker(breaker, cooldown, clock)
        self._cooldown = cooldown
        self._outage = _Outage(url, on_event or (lambda kind, details: None), clock)
        self._sleep = sleep
        self._clock = clock
        self._local = threading.local()

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
        end = None if self.deadline is None else self._clock() + self.deadline
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
        reason = ""
        for attempt in range(1, tries + 1):
            try:
                return self._post(queries, topk, end)
            except _Transient as error:
                reason = str(error)
                self._outage.failing(reason)
                pause = max(self._pauses.pause(attempt), min(error.wait, self._longest_pause))
            if attempt == tries:
                break
            if end is not None and self._clock() + pause >= end:
                tried = "once" if attempt == 1 else f"{attempt} times"
                raise RetrieverUnavailable(
                    f"The retriever at {self.url} {reason} (tried {tried}, within its deadline of "
                    f"{self.deadline:g} s): check that it runs and is reachable."
                )
            self._sleep(pause)
        tried = "once" if tries == 1 else f"{tries} times"
        raise RetrieverUnavailable(
            f"The retriever at {self.url} {reason} (tried {tried}): check that it runs and is reachable."
        )

    def _post(self, queries: list[str], topk: int, end: float | None) -> list[list[Passage]]:
        import requests

        body = {"queries": queries, "topk": topk, "return_scores": True}
        seconds = self.timeout if end is None else max(0.001, min(self.timeout, end - self._clock()))
        try:
            with self._session().post(
                self.url, json=body, timeout=seconds, stream=True, allow_redirects=False
            ) as response:
                content = self._read_bounded(response, end)
        except requests.Timeout as error:
            raise _Transient(f"did not answer within {seconds:g} s") from error
        except requests.RequestException as error:
            raise _Transient(f"could not be reached ({type(error).__name__})") from error
        if response.status_code == 429 or response.status_code >= 500:
            wait = _seconds(response.headers.get("retry-after"))
            raise _Transient(f"answered with status {response.status_code}", wait)
        if response.status_code != 200:
            raise RetrieverUnavailable(_refusal(self.url, response.status_code, content))
        try:
            return _read(json.loads(content), len(queries), topk)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RetrieverUnavailable(
                f"The retriever at {self.url} answered in another form than Search-R1's ({error}): "
                'it must send {"result": [[{"document": {"id", "contents"}, "score"}]]}, one list per query.'
            ) from error

    def _read_bounded(self, response: Any, end: float | None) -> bytes:
        parts, size = [], 0
        for part in response.iter_content(1 << 16):
            parts.append(part)
            size += len(part)
            if size > _LONGEST_ANSWER:
                raise RetrieverUnavailable(
                    f"The retriever at {self.url} answered with more than {_LONGEST_ANSWER >> 20} MiB: "
                    "check that the address is right."
                )
            if end is not None and self._clock() > end:
                raise _Transient("did not finish its answer in time")
        return b"".join(parts)

    def _session(self) -> Any:
        """Return this thread's own session: one is not safe to share."""
        if not hasattr(self._local, "session"):
            import requests

            self._local.session = requests.Session()
            if self._token is not None:
                self._local.session.auth = _Bearer(self._token)
        return self._local.session


class _Transient(Exception):  # noqa: N818 - an internal signal, never seen outside this module
    """This try failed, the next may succeed. ``wait``: seconds that the server asks for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class _Bearer:
    """Shows the token. As the session's own authentication it also keeps a .netrc file from being used."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: Any) -> Any:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


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


def _seconds(text: str | None) -> float:
    """Return what Retry-After asks for; 0 for nothing, or for a date."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 9 else 0.0


def _refusal(url: str, status: int, content: bytes) -> str:
    if status in (401, 403):
        return (
            f"The retriever at {url} refused the request with status {status}: it wants another token; "
            f"set {TOKEN_VARIABLE} or retrieval.token_file."
        )
    try:
        detail = json.loads(content)["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        detail = None
    told = f' ("{detail[:_LONGEST_SENTENCE]}")' if isinstance(detail, str) else ""
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
    return Passage.from_contents(str(document.get("id", "")), contents, float(item.get("score") or 0.0))
