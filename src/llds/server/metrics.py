"""The server's numbers for Prometheus, summed over its worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # set by who starts several workers, before this is imported
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counts requests and queries, and how long they took."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self.requests = Counter("llds_requests", "Requests answered, by HTTP status.", ["status"], **own)
        self.queries = Counter("llds_queries", "Queries answered.", **own)
        self.seconds = Histogram(
            "llds_request_seconds", "Seconds from the whole request to its answer.", buckets=_SECONDS, **own
        )
        self.batches = Histogram("llds_batch_queries", "Queries searched together.", buckets=_QUERIES, **own)
        self._pending = Gauge(
            "llds_pending_queries", "Queries waiting or being searched.", multiprocess_mode="livesum", **own
        )

    @contextmanager
    def pending_queries(self, count: int) -> Iterator[None]:
        """Count ``count`` queries as pending meanwhile."""
        self._pending.inc(count)
        try:
            yield
        finally:
            self._pending.dec(count)

    def text(self) -> bytes:
        """Return all numbers in the text format of Prometheus."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = self._registry
        if _FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
