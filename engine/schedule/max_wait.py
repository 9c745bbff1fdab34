"""A bound on how long any policy may pass a request over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.schedule.ranked import RankedQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.request import Request
    from engine.schedule.base import SchedulePolicy

__all__ = ["BoundedWait"]


class BoundedWait:
    """Another policy, but the oldest request goes next once it has waited for `max_wait_s`.

    Of two admissions at least one is the policy's own choice. So under overload, when everybody has waited that long, the
    order does not collapse into first come, first served, and the oldest still never waits for more than one other.
    """

    def __init__(self, policy: SchedulePolicy, max_wait_s: float, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._arrivals = RankedQueue()
        self._overdue: Request | None = None  # who was named last because of its age
        self._owed = False  # whether the policy's own choice comes next

    def add(self, request: Request) -> None:
        """Take a request in."""
        self._policy.add(request)
        self._arrivals.put(request, 0)

    def discard(self, request: Request) -> None:
        """Let a request go."""
        self._policy.discard(request)
        self._arrivals.discard(request)

    def take(self, request: Request) -> None:
        """Let a request go that was admitted."""
        self._owed = request is self._overdue
        self._overdue = None
        self._policy.take(request)
        self._arrivals.discard(request)

    def first(self, running: Sequence[Request]) -> Request | None:
        """Who goes next."""
        self._overdue = None
        oldest = self._arrivals.first()
        if oldest is not None and not self._owed and self._clock() - oldest.arrived_s >= self._max_wait_s:
            self._overdue = oldest
            return oldest
        return self._policy.first(running)

    def landed(self, request: Request) -> None:
        """Pass it on."""
        self._policy.landed(request)
