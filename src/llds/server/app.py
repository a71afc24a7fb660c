"""The web application: ``POST /retrieve`` as Search-R1's server has it, ``GET /health`` and ``GET /metrics``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from llds._version import __version__
from llds.errors import LLDSError
from llds.search.passages import Passage
from llds.search.retrieval import Retriever, search_checked
from llds.server.batching import Batcher, Busy
from llds.server.metrics import Metrics
from llds.server.reading import Asked, Refused, check_token, parse, read_body
from llds.server.settings import ServerSettings

_log = logging.getLogger(__name__)


def create_app(
    retriever: Retriever, settings: ServerSettings, about: dict[str, Any] | None = None
) -> FastAPI:
    """Return the application that answers from ``retriever``; ``about`` is told by ``/health``."""
    metrics = Metrics()
    batcher = Batcher(
        lambda queries, topk: search_checked(retriever, queries, topk),
        settings.batch,
        settings.max_pending,
        metrics.batches.observe,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()

    app = FastAPI(title="llds", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        check_token(request, settings.token)
        asked = parse(await read_body(request, settings), settings)
        began = time.perf_counter()
        with metrics.pending_queries(len(asked.queries)):
            found = await _search(batcher, asked, settings)
        metrics.seconds.observe(time.perf_counter() - began)
        metrics.queries.inc(len(asked.queries))
        metrics.requests.labels("200").inc()
        return JSONResponse({"result": [_answer(passages, asked.return_scores) for passages in found]})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "version": __version__, **(about or {})}

    @app.get("/metrics")
    async def numbers(request: Request) -> Response:
        check_token(request, settings.token)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return _told(metrics, error.status, error.sentence)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        places = "POST /retrieve, GET /health and GET /metrics"
        return _told(
            metrics,
            error.status_code,
            f"There is no {request.method} {request.url.path}: there are {places}.",
        )

    @app.exception_handler(LLDSError)
    async def failed(request: Request, error: LLDSError) -> Response:
        _log.error("%s", error)
        return _told(metrics, 500, str(error))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return _told(metrics, 500, "The search failed: see the server's log.")

    return app


async def _search(batcher: Batcher, asked: Asked, settings: ServerSettings) -> list[list[Passage]]:
    try:
        async with asyncio.timeout(settings.seconds):
            return await batcher.ask(asked.queries, asked.topk)
    except TimeoutError:
        raise Refused(
            504, f"The search took longer than {settings.seconds:g} s: send fewer queries at a time."
        ) from None
    except Busy:
        raise Refused(
            503, f"More than {settings.max_pending} queries are waiting: try again in a moment."
        ) from None


def _answer(passages: Sequence[Passage], with_scores: bool) -> list[dict[str, Any]]:
    documents = [{"id": passage.id, "contents": passage.contents} for passage in passages]
    if not with_scores:
        return list(documents)
    return [
        {"document": document, "score": passage.score}
        for document, passage in zip(documents, passages, strict=True)
    ]


def _told(metrics: Metrics, status: int, sentence: str) -> Response:
    """Return an error. The connection ends with it: what is left of the request is not worth reading."""
    metrics.requests.labels(str(status)).inc()
    headers = {"connection": "close"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 503:
        headers["retry-after"] = "1"
    return JSONResponse({"detail": sentence}, status, headers)
