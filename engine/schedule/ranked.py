"""A queue by rank whose ranks may change at any time."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import Request

__all__ = ["RankedQueue"]

SLACK = 64


class RankedQueue:
    """Requests by rank, the lowest first; ties by arrival. Every call is O(log n), amortised.

    A heap in which outdated entries stay until they come up, or until they are more than half of it.
    """

    def __init__(self) -> None:
        self._ranks: dict[Request, float] = {}
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, request: object) -> bool:
        return request in self._ranks

    def rank(self, request: Request) -> float:
        """The rank it has now."""
        return self._ranks[request]

    def put(self, request: Request, rank: float) -> None:
        """Add a request, or change its rank."""
        if self._ranks.get(request) == rank:
            return
        self._ranks[request] = rank
        heappush(self._heap, (rank, request.serial, request))
        if len(self._heap) > 2 * len(self._ranks) + SLACK:
            self._heap = [(rank, request.serial, request) for request, rank in self._ranks.items()]
            heapify(self._heap)

    def discard(self, request: Request) -> None:
        """Remove a request, if it is in here."""
        self._ranks.pop(request, None)

    def first(self) -> Request | None:
        """The request with the lowest rank; it stays in here."""
        heap, ranks = self._heap, self._ranks
        while heap:
            rank, _, request = heap[0]
            if ranks.get(request) == rank:
                return request
            heappop(heap)
        return None
