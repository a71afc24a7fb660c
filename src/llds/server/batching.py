"""Requests that arrive while a search is running are searched together, next. Nobody waits for company."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llds.search.passages import Passage

Search = Callable[[Sequence[str], int], list[list[Passage]]]


class Busy(Exception):  # noqa: N818 - the state of a server
    """Too many queries are waiting already."""


@dataclass
class _Job:
    queries: Sequence[str]
    topk: int
    answer: asyncio.Future[list[list[Passage]]]


class Batcher:
    """Hands queries to ``search`` in batches of at most ``batch``, one after the other, in one thread.

    ``max_pending``: queries waiting beyond which :class:`Busy` is raised; one request alone is always taken.
    ``on_batch`` is told the number of queries of each batch. Start and stop it within a running loop.
    """

    def __init__(
        self,
        search: Search,
        batch: int,
        max_pending: int,
        on_batch: Callable[[int], None] = lambda queries: None,
    ) -> None:
        self._search = search
        self._batch = batch
        self._max_pending = max_pending
        self._on_batch = on_batch
        self._jobs: deque[_Job] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "search")
        self._task: asyncio.Task[None] | None = None
        self.pending = 0

    def start(self) -> None:
        """Begin to work."""
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop; what is still waiting is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for job in self._jobs:
            job.answer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def ask(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return the passages of every query, in order."""
        if self.pending and self.pending + len(queries) > self._max_pending:
            raise Busy
        loop = asyncio.get_running_loop()
        # A long request goes in pieces, between which others have their turn.
        pieces = [queries[first : first + self._batch] for first in range(0, len(queries), self._batch)]
        jobs = [_Job(piece, topk, loop.create_future()) for piece in pieces]
        self.pending += len(queries)
        try:
            self._jobs.extend(jobs)
            self._arrived.set()
            answers = await asyncio.gather(*(job.answer for job in jobs))
        finally:
            self.pending -= len(queries)
            for job in jobs:
                job.answer.cancel()
        return [passages for answer in answers for passages in answer]

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            jobs = self._next_batch()
            if jobs:
                await self._run(jobs)
            elif not self._jobs:
                self._arrived.clear()

    def _next_batch(self) -> list[_Job]:
        """Take waiting jobs of one topk, oldest first, as many as fit; those given up are dropped."""
        taken: list[_Job] = []
        size = 0
        while self._jobs:
            job = self._jobs[0]
            if not job.answer.done():
                if taken and (job.topk != taken[0].topk or size + len(job.queries) > self._batch):
                    break
                taken.append(job)
                size += len(job.queries)
            self._jobs.popleft()
        return taken

    async def _run(self, jobs: list[_Job]) -> None:
        queries = [query for job in jobs for query in job.queries]
        self._on_batch(len(queries))
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self._search, queries, jobs[0].topk)
        except Exception as error:
            # What one query does to the search must not fall on those that came with it.
            if len(jobs) > 1:
                for job in jobs:
                    await self._run([job])
            elif not jobs[0].answer.done():
                jobs[0].answer.set_exception(error)
            return
        first = 0
        for job in jobs:
            if not job.answer.done():
                job.answer.set_result(answers[first : first + len(job.queries)])
            first += len(job.queries)
