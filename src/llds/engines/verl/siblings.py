"""Episodes of one question that run side by side wait for each other, to know how many came through.

GRPO compares the rewards of a question's responses. When the search tool fails in all but one of them there is
nothing to compare that one with, so it is to be left out as well; but each is handed to verl on its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class _Group:
    members: int = 0
    settled: int = 0
    through: int = 0
    first_failure: bool = True
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, came_through: bool) -> None:
        self.settled += 1
        self.through += came_through
        if self.settled == self.members:
            self.over.set()


@dataclass(frozen=True)
class Outcome:
    """What came of a group. ``members``, ``through``: episodes begun, and those without a failure."""

    members: int
    through: int

    @property
    def comparable(self) -> bool:
        """Whether what came through can be compared with something, or was alone from the start."""
        return self.through >= min(2, self.members)


class Membership:
    """The part of one episode in its group."""

    def __init__(self, group: _Group) -> None:
        self._group = group
        self._is_settled = False

    async def settle(self, came_through: bool) -> Outcome:
        """Say how this episode ended and wait for those that began beside it."""
        self._leave(came_through)
        await self._group.over.wait()
        return Outcome(self._group.members, self._group.through)

    def is_first_failure(self) -> bool:
        """Return True to one member of a group only, which is to speak for all."""
        first, self._group.first_failure = self._group.first_failure, False
        return first

    def _leave(self, came_through: bool) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._group.settle(came_through)


class Siblings:
    """The groups under way in one process; for one event loop.

    ``left_out``: episodes that were left out so far, for their callers to count.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._groups: dict[str, _Group] = {}

    @asynccontextmanager
    async def join(self, key: str) -> AsyncIterator[Membership]:
        """Take part in the group ``key`` from here on; who leaves by an exception did not come through.

        verl makes the tasks of all episodes of a question before any of them runs. Each gives way once after it
        has joined, so all have joined before one can end.
        """
        group = self._groups.get(key)
        if group is None or group.over.is_set():
            group = self._groups[key] = _Group()
        group.members += 1
        member = Membership(group)
        try:
            await asyncio.sleep(0)
            yield member
        finally:
            member._leave(False)
            if group.over.is_set() and self._groups.get(key) is group:
                del self._groups[key]
