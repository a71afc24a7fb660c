"""The loop of an evaluation: pending tasks go to the engine, rows go to the journal, until all is answered."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from llds.evaluation.contestants import Contestant
from llds.evaluation.folder import Journal
from llds.evaluation.rows import AnswerRow, score
from llds.evaluation.tasks import Task
from llds.inference.engine import Engine
from llds.search.retrieval import RetrieverUnavailable
from llds.search.sampling import Sampling
from llds.search.trajectory import Episode

_CHUNK = 1024  # tasks whose prompts are made at a time
_UNANSWERED = Episode([], [], [], [], [], None, None, "tool_failed")


def answer(
    tasks: Sequence[Task],
    contestant: Contestant,
    engine: Engine,
    sampling: Sampling,
    seed: int,
    journal: Journal,
    *,
    count: Callable[[int], None] = lambda done: None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Let ``contestant`` do the pending ``tasks``; return whether all are done, or it was ``stopped`` before.

    Episodes that are played side by side influence each other's rounding, so the tasks are cut into the same
    batches however often they are interrupted. Raises :class:`RetrieverUnavailable` when the search tool failed
    for every task, and what the engine raises.
    """
    pending = _whole_batches(tasks, engine.batch, journal)
    done = len(tasks) - len(journal.pending(tasks))
    count(done)
    size = engine.batch * math.ceil(_CHUNK / engine.batch)
    for first in range(0, len(pending), size):
        chunk = pending[first : first + size]
        for rows in _answered(chunk, contestant, engine, sampling, seed):
            new = [row for row in rows if _better(row, journal)]
            journal.add(new)
            done += sum(not row.tool_failed for row in new)
            count(done)
            if stopped():
                return not journal.pending(tasks)
    if tasks and all(journal.rows[task.key].tool_failed for task in tasks):
        raise RetrieverUnavailable(
            "The search tool failed for every question: check it, then run the same command again."
        )
    return True


def _whole_batches(tasks: Sequence[Task], batch: int, journal: Journal) -> list[Task]:
    """Return the batches in which a task is pending, as they would have been without an interruption."""
    open_ = {task.key for task in journal.pending(tasks)}
    parts = [tasks[first : first + batch] for first in range(0, len(tasks), batch)]
    return [task for part in parts if any(task.key in open_ for task in part) for task in part]


def _better(row: AnswerRow, journal: Journal) -> bool:
    """Whether ``row`` says more than what is there: the first answer stays, a failed search does not."""
    kept = journal.rows.get(row.key)
    return kept is None or (kept.tool_failed and not row.tool_failed)


def _answered(
    tasks: Sequence[Task], contestant: Contestant, engine: Engine, sampling: Sampling, seed: int
) -> Iterator[list[AnswerRow]]:
    try:
        prompts = contestant.prompts([task.question.question for task in tasks])
    except RetrieverUnavailable:
        yield [_row(task, contestant, _UNANSWERED) for task in tasks]
        return
    seeds = [task.seed(seed) for task in tasks]
    with closing(engine.play(prompts, contestant.game, sampling, seeds)) as played:
        for finished in played:
            yield [_row(tasks[number], contestant, contestant.read(episode)) for number, episode in finished]


def _row(task: Task, contestant: Contestant, episode: Episode) -> AnswerRow:
    row = score(task.question, episode, benchmark=task.benchmark, sample=task.sample)
    if contestant.searches is None:
        return row
    return dataclasses.replace(row, searches=contestant.searches, valid_searches=contestant.searches)
