"""Requests read and checked. What is wrong with one is said in a sentence, under a status of 4xx."""

from __future__ import annotations

import asyncio
import hmac
import json
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from llds.server.settings import ServerSettings


class Refused(Exception):  # noqa: N818 - the state of a request
    """A request that gets no answer. ``status``: of HTTP; ``sentence``: what is wrong and what to do."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


@dataclass(frozen=True)
class Asked:
    """The content of a request of Search-R1's protocol."""

    queries: list[str]
    topk: int
    return_scores: bool


def check_token(request: Request, token: str | None) -> None:
    """Raise :class:`Refused` unless the request shows ``token``."""
    if token is None:
        return
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(shown.strip().encode("utf-8", "replace"), token.encode())
    if scheme.lower() != "bearer" or not right:
        raise Refused(401, "This server asks for a token: send the header 'Authorization: Bearer TOKEN'.")


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """Return the body; never holds more of it than allowed, whatever its header says."""
    too_long = Refused(
        413, f"The body is longer than {settings.max_body} bytes: send the queries in several requests."
    )
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced[:20]) > settings.max_body:
        raise too_long
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "The body is compressed: send it as it is.")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > settings.max_body:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        raise Refused(
            408, f"The body did not arrive within {settings.body_seconds:g} s: send it faster."
        ) from None
    except ClientDisconnect:
        raise Refused(400, "The connection broke off before the body was complete: send it again.") from None
    return b"".join(parts)


def parse(body: bytes, settings: ServerSettings) -> Asked:
    """Return what ``body`` asks for; raises :class:`Refused` when it isn't Search-R1's protocol."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, f"The body is not JSON: {_SHAPE}") from None
    if not isinstance(content, dict):
        raise Refused(422, f"The body is not a JSON object: {_SHAPE}")
    return Asked(
        queries=_queries(content.get("queries"), settings),
        topk=_topk(content.get("topk"), settings),
        return_scores=_flag(content.get("return_scores")),
    )


_SHAPE = 'send {"queries": ["..."], "topk": 3, "return_scores": true}.'


def _queries(value: Any, settings: ServerSettings) -> list[str]:
    if not isinstance(value, list):
        raise Refused(422, f'"queries" is not a list of texts: {_SHAPE}')
    if len(value) > settings.max_queries:
        raise Refused(
            422, f"There are {len(value)} queries, more than {settings.max_queries}: send several requests."
        )
    for number, query in enumerate(value, start=1):
        if not isinstance(query, str):
            raise Refused(422, f"Query {number} is not a text: {_SHAPE}")
        if len(query) > settings.max_query:
            raise Refused(
                422,
                f"Query {number} has {len(query)} characters, more than {settings.max_query}: shorten it.",
            )
        try:
            query.encode()
        except UnicodeEncodeError:
            raise Refused(
                422, f"Query {number} holds half of a surrogate pair: send whole characters."
            ) from None
    return value


def _topk(value: Any, settings: ServerSettings) -> int:
    if value is None or value == 0:
        return settings.topk
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= settings.max_topk:
        raise Refused(
            422, f'"topk" is not a whole number from 1 to {settings.max_topk}: name one, or leave it out.'
        )
    return value


def _flag(value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise Refused(422, '"return_scores" is neither true nor false: name one of them.')
