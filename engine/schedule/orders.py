"""Policies that don't look at the cache."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.schedule.ranked import RankedQueue

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from engine.request import Request

__all__ = ["ByRank", "ByRoutingKey", "InRandomOrder", "by_arrival", "by_output", "by_priority"]


class ByRank:
    """By a number that each request has for good, the lowest first; ties by arrival."""

    def __init__(self, rank: Callable[[Request], float]) -> None:
        self._rank = rank
        self._queue = RankedQueue()

    def add(self, request: Request) -> None:
        """Take a request in."""
        self._queue.put(request, self._rank(request))

    def discard(self, request: Request) -> None:
        """Let a request go."""
        self._queue.discard(request)

    take = discard

    def first(self, running: Sequence[Request]) -> Request | None:
        """Who goes next."""
        return self._queue.first()

    def landed(self, request: Request) -> None:
        """The cache does not matter here."""


def by_arrival() -> ByRank:
    """`fcfs`: first come, first served. A retracted request keeps its place."""
    return ByRank(lambda request: 0)


def by_output() -> ByRank:
    """`lof`: the longest possible answer first."""
    return ByRank(lambda request: request.lease.prompt_tokens - request.limit)


def by_priority() -> ByRank:
    """`priority`: the highest priority first."""
    return ByRank(lambda request: -request.message.priority)


class InRandomOrder:
    """`random`: everybody has the same chance at each admission."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._requests: list[Request] = []
        self._places: dict[Request, int] = {}
        self._chosen: Request | None = None

    def add(self, request: Request) -> None:
        """Take a request in."""
        self._places[request] = len(self._requests)
        self._requests.append(request)

    def discard(self, request: Request) -> None:
        """Let a request go: the last one takes its place."""
        place = self._places.pop(request, None)
        if place is None:
            return
        last = self._requests.pop()
        if last is not request:
            self._requests[place] = last
            self._places[last] = place
        if request is self._chosen:
            self._chosen = None

    take = discard

    def first(self, running: Sequence[Request]) -> Request | None:
        """Who goes next: drawn once, and then it stays until it went."""
        if self._chosen is None and self._requests:
            self._chosen = self._rng.choice(self._requests)
        return self._chosen

    def landed(self, request: Request) -> None:
        """The cache does not matter here."""


class ByRoutingKey:
    """`routing-key`: whose routing key most running requests have; nobody's left, the oldest."""

    def __init__(self) -> None:
        self._all = RankedQueue()
        self._groups: dict[str, RankedQueue] = {}

    def add(self, request: Request) -> None:
        """Take a request in."""
        self._all.put(request, 0)
        self._groups.setdefault(request.message.routing_key, RankedQueue()).put(request, 0)

    def discard(self, request: Request) -> None:
        """Let a request go."""
        key = request.message.routing_key
        self._all.discard(request)
        if group := self._groups.get(key):
            group.discard(request)
            if not group:
                del self._groups[key]

    take = discard

    def first(self, running: Sequence[Request]) -> Request | None:
        """Who goes next. Requests without a key belong to nobody's group."""
        counts = Counter(request.message.routing_key for request in running)
        for key, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            if key and (group := self._groups.get(key)):
                return group.first()
        return self._all.first()

    def landed(self, request: Request) -> None:
        """The cache does not matter here."""
