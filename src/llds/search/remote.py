"""Client of Search-R1's retrieval server.

``POST {"queries": [...], "topk": k, "return_scores": true}`` is answered by
``{"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}]]}``, one list per query.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from llds.errors import LLDSError
from llds.search.passages import Passage


class RetrieverUnavailable(LLDSError):  # noqa: N818 - a state, named as callers speak of it
    """The search tool is out of order. Its episodes are left out, never rewarded with 0."""


class HTTPRetriever:
    """Search through a server that speaks Search-R1's protocol.

    ``url``: the whole address, e.g. ``http://host:8000/retrieve``. ``timeout``: seconds to wait for a
    connection, and then between any two bytes of the answer. ``tries``: how often one request is sent
    before :class:`RetrieverUnavailable` is raised; refused and broken connections, timeouts, and the
    statuses 429 and 5xx are tried again, anything else is not. ``backoff``: seconds before the second try,
    doubled for each further one and varied by up to half, so that many workers don't return at once.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        tries: int = 3,
        backoff: float = 0.5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise LLDSError(
                f"Retriever address {url!r} is not a URL: write e.g. http://127.0.0.1:8000/retrieve."
            )
        if timeout <= 0 or tries < 1 or backoff < 0:
            raise LLDSError(
                f"Retriever settings timeout={timeout}, tries={tries}, backoff={backoff} are out of range: "
                "timeout must be positive, tries at least 1, backoff not negative."
            )
        import requests

        self.url = url
        self.timeout = timeout
        self.tries = tries
        self.backoff = backoff
        self._sleep = sleep
        self._random = random.Random()
        self._session = requests.Session()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return the server's passages, at most ``topk`` per query; empty queries are not sent."""
        asked = [query for query in queries if query.strip()]
        found = iter(self._ask(asked, topk) if asked else [])
        return [next(found) if query.strip() else [] for query in queries]

    def probe(self) -> None:
        """Send one small query. Raises :class:`RetrieverUnavailable` with the reason if it isn't answered."""
        self.search(["probe"], 1)

    def _ask(self, queries: list[str], topk: int) -> list[list[Passage]]:
        reason = ""
        for attempt in range(self.tries):
            if attempt:
                self._sleep(self.backoff * 2 ** (attempt - 1) * self._random.uniform(0.5, 1.5))
            try:
                return self._post(queries, topk)
            except _Transient as error:
                reason = str(error)
        tried = "once" if self.tries == 1 else f"{self.tries} times"
        raise RetrieverUnavailable(
            f"The retriever at {self.url} {reason} (tried {tried}): check that it runs and is reachable."
        )

    def _post(self, queries: list[str], topk: int) -> list[list[Passage]]:
        import requests

        body = {"queries": queries, "topk": topk, "return_scores": True}
        try:
            response = self._session.post(self.url, json=body, timeout=self.timeout)
        except requests.Timeout as error:
            raise _Transient(f"did not answer within {self.timeout:g} s") from error
        except requests.RequestException as error:
            raise _Transient(f"could not be reached ({type(error).__name__})") from error
        if response.status_code == 429 or response.status_code >= 500:
            raise _Transient(f"answered with status {response.status_code}")
        if response.status_code != 200:
            raise RetrieverUnavailable(
                f"The retriever at {self.url} refused the request with status {response.status_code}: check "
                "the path of its address and that it speaks Search-R1's protocol."
            )
        try:
            return _read(response.json(), len(queries), topk)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RetrieverUnavailable(
                f"The retriever at {self.url} answered in another form than Search-R1's ({error}): "
                'it must send {"result": [[{"document": {"id", "contents"}, "score"}]]}, one list per query.'
            ) from error


class _Transient(Exception):  # noqa: N818 - an internal signal, never seen outside this module
    """This try failed, the next may succeed."""


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
