"""What a client of an unreliable service needs: growing pauses, a breaker, a bounded cache. No I/O here."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Backoff:
    """Pauses between tries, with full jitter: each is drawn evenly from 0 to a bound that doubles from
    ``first`` to ``longest`` seconds, so that many clients don't return at once.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self.longest = longest
        self._random = random.Random()

    def pause(self, tries: int) -> float:
        """Return the seconds to wait after ``tries`` failed tries, 1 or more."""
        return self._random.uniform(0, min(self.longest, self._first * 2 ** min(tries - 1, 60)))


class Breaker:
    """Stops asking a service that is down.

    After ``failures`` in a row it is open for ``cooldown`` seconds: nobody may ask. Then one may, and the
    outcome closes it or opens it again. ``clock``: seconds, rising.
    """

    def __init__(self, failures: int, cooldown: float, clock: Callable[[], float]) -> None:
        self._failures = failures
        self._cooldown = cooldown
        self._clock = clock
        self._lock = threading.Lock()
        self._row = 0
        self._until = 0.0
        self._trying = False

    def wait(self) -> float:
        """Return the seconds to wait before asking; 0 is leave to ask, and the outcome must be reported."""
        with self._lock:
            if self._row < self._failures:
                return 0.0
            left = self._until - self._clock()
            if left > 0 or self._trying:
                return max(left, 0.001)
            self._trying = True
            return 0.0

    @property
    def on_trial(self) -> bool:
        """Whether the service was down and one request is trying it out."""
        return self._trying

    def succeeded(self) -> None:
        """Report that the service answered."""
        with self._lock:
            self._row, self._trying = 0, False

    def failed(self) -> bool:
        """Report that the service did not answer; say whether that opened the breaker."""
        with self._lock:
            self._row += 1
            self._trying = False
            if self._row < self._failures:
                return False
            self._until = self._clock() + self._cooldown
            return True

    def abandoned(self) -> None:
        """Report that there is no outcome: the request was broken off by its caller."""
        with self._lock:
            self._trying = False


class Cache(Generic[Key, Value]):
    """At most ``size`` values, those used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """Return the value of ``key``, or None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Keep a value; the one used longest ago makes room."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._size:
                self._values.popitem(last=False)
