"""What a server is told: which index, where to listen, and how much it takes on."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from llds.errors import LLDSError


@dataclass(frozen=True)
class ServerSettings:
    """Settings of ``llds serve``.

    ``index``: the folder. ``mode``, ``rerank``: how it is searched. ``workers``: processes that share it.
    ``token``: what clients must show, None for nothing. ``topk``: passages when a request names no number.
    ``max_body`` (bytes), ``max_queries`` and ``max_topk`` per request, ``max_query`` (characters): beyond
    them a request is refused. ``max_pending``: queries waiting per worker beyond which it says that it is
    busy. ``max_connections``: of one worker. ``batch``: queries searched at a time. ``body_seconds``: for a
    request to arrive; ``seconds``: for its answer; ``grace_seconds``: for what is under way when the server
    is told to stop.
    """

    index: str
    mode: str = "auto"
    rerank: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    token: str | None = None
    topk: int = 3
    max_body: int = 32 << 20
    max_queries: int = 16_384
    max_query: int = 16_384
    max_topk: int = 100
    max_pending: int = 65_536
    max_connections: int = 1024
    batch: int = 256
    body_seconds: float = 30.0
    seconds: float = 60.0
    grace_seconds: float = 15.0

    def __post_init__(self) -> None:
        """Raise :class:`LLDSError` for a value that makes no sense."""
        counts = ("workers", "topk", "max_body", "max_queries", "max_query", "max_topk", "max_pending")
        for name in (*counts, "max_connections", "batch", "body_seconds", "seconds"):
            if not getattr(self, name) > 0:
                raise LLDSError(f"The server's {name} is {getattr(self, name)}: it must be above 0.")
        if not 0 <= self.port <= 65535:
            raise LLDSError(f"Port {self.port} is out of range: name one from 0 (any free one) to 65535.")
        if self.topk > self.max_topk:
            raise LLDSError(
                f"topk {self.topk} is above max_topk {self.max_topk}: lower it or raise the other."
            )
        if self.token is not None and (not self.token.isascii() or not self.token.strip()):
            raise LLDSError("The token must be visible ASCII characters: make one with openssl rand -hex 32.")

    def to_json(self) -> str:
        """Return the settings as text, for another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerSettings:
        """Read what :meth:`to_json` wrote."""
        return cls(**json.loads(text))
