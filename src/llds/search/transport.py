"""Requests to a service that may fail: bounded, timed, and tried again where that may help."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from llds.search.resilience import Backoff

Result = TypeVar("Result")


class Transient(Exception):  # noqa: N818 - a signal between a client and its transport, never shown as it is
    """This try failed, the next may succeed. ``wait``: seconds that the server asks for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class TooLong(Exception):  # noqa: N818 - as Transient
    """The answer has more bytes than it may have."""


class GivenUp(Exception):  # noqa: N818 - as Transient
    """All tries failed. The text says why the last one did, and how often it was tried."""


class Transport:
    """Sends JSON over HTTP. Threads may share one.

    ``token``: shown as a bearer token. ``longest``: bytes of the longest answer. ``clock``: seconds, rising.
    """

    def __init__(self, token: str | None, longest: int, clock: Callable[[], float]) -> None:
        self._token = token
        self._longest = longest
        self._clock = clock
        self._local = threading.local()

    def send(
        self, url: str, body: Any = None, *, timeout: float, end: float | None = None
    ) -> tuple[int, bytes]:
        """POST ``body``, or GET without one; return status and content of the answer.

        ``timeout``: seconds to wait for a connection, and then between any two bytes. ``end``: when the clock
        says so it is over. Raises :class:`Transient` when there is no whole answer, and for the statuses 429
        and 5xx; :class:`TooLong`. Redirections are not followed: they could take the token elsewhere.
        """
        import requests
        from urllib3.exceptions import HTTPError
        from urllib3.exceptions import TimeoutError as TimedOut

        seconds = timeout if end is None else max(0.001, min(timeout, end - self._clock()))
        method = "GET" if body is None else "POST"
        try:
            with self._session().request(
                method, url, json=body, timeout=seconds, stream=True, allow_redirects=False
            ) as response:
                content = self._read_bounded(response, end)
        except (requests.Timeout, TimedOut) as error:
            raise Transient(f"did not answer within {seconds:g} s") from error
        except (requests.RequestException, HTTPError) as error:
            raise Transient(f"could not be reached ({type(error).__name__})") from error
        if response.status_code == 429 or response.status_code >= 500:
            wait = _seconds(response.headers.get("retry-after"))
            raise Transient(f"answered with status {response.status_code}", wait)
        return response.status_code, content

    def _read_bounded(self, response: Any, end: float | None) -> bytes:
        parts, size = [], 0
        # Whatever has come, not full pieces: a server that sends a byte now and then would never fill one.
        while part := response.raw.read1(1 << 16, decode_content=True):
            parts.append(part)
            size += len(part)
            if size > self._longest:
                raise TooLong
            if end is not None and self._clock() > end:
                raise Transient("did not finish its answer in time")
        return b"".join(parts)

    def _session(self) -> Any:
        """Return this thread's own session: one is not safe to share."""
        if not hasattr(self._local, "session"):
            import requests

            self._local.session = requests.Session()
            if self._token is not None:
                self._local.session.auth = _Bearer(self._token)
        return self._local.session


class Patience:
    """How often, how long and with which pauses a request is tried.

    ``tries``: at least 1. ``deadline``: seconds for all of them, or None; ``sleep`` and ``clock`` in seconds.
    """

    def __init__(
        self,
        tries: int,
        pauses: Backoff,
        deadline: float | None,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self.tries, self.pauses, self.deadline = tries, pauses, deadline
        self._sleep, self._clock = sleep, clock

    def end(self) -> float | None:
        """Return when a request that begins now is over."""
        return None if self.deadline is None else self._clock() + self.deadline

    def insist(
        self,
        attempt: Callable[[], Result],
        end: float | None,
        tries: int | None = None,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> Result:
        """Return what ``attempt`` returns, calling it again after :class:`Transient`.

        Raises :class:`GivenUp` when the tries, or the time up to ``end``, are used up.
        """
        tries = tries or self.tries
        for number in range(1, tries + 1):
            try:
                return attempt()
            except Transient as error:
                reason, wait = str(error), error.wait
            on_failure(reason)
            pause = max(self.pauses.pause(number), min(wait, self.pauses.longest))
            tried = "once" if number == 1 else f"{number} times"
            if number == tries:
                raise GivenUp(f"{reason} (tried {tried})")
            if end is not None and self._clock() + pause >= end:
                raise GivenUp(f"{reason} (tried {tried}, within its deadline of {self.deadline:g} s)")
            self._sleep(pause)
        raise AssertionError("unreachable")


class _Bearer:
    """Shows the token. As the session's own authentication it also keeps a .netrc file from being used."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: Any) -> Any:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def told_by(content: bytes) -> str | None:
    """Return the sentence in a refusal, in any of the shapes that servers give it; None without one."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return None
    for keys in (("detail",), ("error", "message"), ("message",), ("error",)):
        found = answer
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, str) and found.strip():
            return " ".join(found.split())[:_LONGEST_SENTENCE]
    return None


_LONGEST_SENTENCE = 200  # characters of a server's own words


def _seconds(text: str | None) -> float:
    """Return what Retry-After asks for; 0 for nothing, or for a date."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 9 else 0.0
