"""Running the server: one process, or several that share a listening socket and the mapped index."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

from llds.errors import LLDSError
from llds.retrieval.opening import Mode, open_index, read_info
from llds.retrieval.rankers import IndexRetriever
from llds.server.settings import ServerSettings

_SETTINGS = "LLDS_SERVER_SETTINGS"
_BACKLOG = 2048
_HEALTH_SECONDS = 60  # a worker that is silent for longer is replaced


def serve(settings: ServerSettings, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM; then finish what is under way and return.

    ``on_ready`` is told the address once the index is open and the port is taken. Raises :class:`LLDSError`
    when the index can't be opened, the port is not free, or a package is missing.
    """
    check_installed()
    retriever = _open(settings)
    retriever.search(["ready"], 1)
    with _listening(settings.host, settings.port) as listener:
        url = f"http://{_shown(settings.host)}:{listener.getsockname()[1]}/retrieve"
        if settings.workers == 1:
            _serve_alone(settings, retriever, listener, lambda: on_ready(url))
        else:
            del retriever
            _serve_together(settings, listener, lambda: on_ready(url))


def worker_app() -> Any:
    """Return the application of one worker process, by the settings in its environment."""
    settings = ServerSettings.from_json(os.environ[_SETTINGS])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return _app(settings, _open(settings))


def _end_with_parent() -> None:
    """Stop this worker when its parent was killed, which would otherwise leave it holding the port."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def check_installed() -> None:
    """Raise :class:`LLDSError` when a package that serving needs is missing."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise LLDSError(f'Serving needs {error.name}: run pip install "llds[serve]".') from error


def _open(settings: ServerSettings) -> IndexRetriever:
    reranker = None
    if settings.rerank is not None:
        from llds.retrieval.rerank import CrossEncoderScorer

        reranker = CrossEncoderScorer(settings.rerank)
    return open_index(settings.index, cast(Mode, settings.mode), reranker)


def _app(settings: ServerSettings, retriever: IndexRetriever) -> Any:
    from llds.server.app import create_app

    info = read_info(settings.index)
    about = {"passages": info.passages, "encoder": info.encoder, "mode": settings.mode}
    return create_app(retriever, settings, about)


def _serve_alone(
    settings: ServerSettings,
    retriever: IndexRetriever,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    import uvicorn

    server = uvicorn.Server(_config(settings, _app(settings, retriever)))
    # uvicorn sends itself the signal again once it has stopped; that the server ended as told is no failure.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    on_ready()
    server.run(sockets=[listener])


def _serve_together(settings: ServerSettings, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    from uvicorn.config import STARTUP_FAILURE
    from uvicorn.supervisors import Multiprocess

    with tempfile.TemporaryDirectory(prefix="llds-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        os.environ[_SETTINGS] = settings.to_json()
        supervisor = Multiprocess(_config(settings, "llds.server.serving:worker_app"), sockets=[listener])
        on_ready()
        supervisor.run()
        if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
            raise LLDSError("A worker process could not start: its own message above says why.")


def _config(settings: ServerSettings, app: Any) -> Any:
    import uvicorn

    return uvicorn.Config(
        app,
        factory=isinstance(app, str),
        workers=settings.workers,
        http="h11",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=max(1, round(settings.grace_seconds)),
        timeout_worker_healthcheck=_HEALTH_SECONDS,
    )


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Give a socket that already takes connections, so that none is refused while the workers start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            told = getattr(error, "strerror", None) or error
            raise LLDSError(
                f"The server can't listen at {host} port {port} ({told}): name another --host or --port."
            ) from error
        listener.listen(_BACKLOG)
        listener.set_inheritable(True)
        yield listener


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
