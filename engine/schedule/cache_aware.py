"""`cache-aware`: the request that costs least to compute first, where a shared prefix is charged to all who wait for it.

Requests in a cluster with a common prefix that is not in memory each bear a part of it, so a large cluster's first request, its
pioneer, goes early; its siblings wait until the prefix is there (`engine.schedule.sharing`), and cost little by then.
So far this is Smith's rule, shortest first, with the cost of a prefix spread over its users.

Requests without siblings have a lane of their own, in order of arrival, and the lanes take turns by stride: each lane gets
computing time in proportion to what waits in it. So long lonely prompts are not starved by short and shared ones.

After PEEK (arXiv 2607.02525) and Strata (OSDI '26), and stride scheduling (Waldspurger and Weihl, 1995).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.schedule.prefixes import PrefixOrder
from engine.schedule.ranked import RankedQueue

if TYPE_CHECKING:
    from engine.request import Request
    from hicache.cache import HiCache

__all__ = ["CacheAware"]


class _Lane:
    """Stride scheduling's view of a lane: what waits in it, in tokens, and how far it has been served."""

    def __init__(self) -> None:
        self.waiting = 0.0
        self.served = 0.0
        self._costs: dict[Request, float] = {}

    def put(self, request: Request, cost: float) -> None:
        """A request waits here, and is worth so many tokens."""
        self.discard(request)
        self._costs[request] = cost
        self.waiting += cost

    def discard(self, request: Request) -> float:
        """A request does not wait here any more; returns what it was worth."""
        cost = self._costs.pop(request, 0.0)
        self.waiting = self.waiting - cost if self._costs else 0.0
        return cost

    def __len__(self) -> int:
        return len(self._costs)


class CacheAware(PrefixOrder):
    """Least shared cost first; a lane by arrival for those without siblings."""

    def __init__(self, cache: HiCache) -> None:
        super().__init__(cache)
        self._page_size = cache.geometry.page_size
        self._lonely = RankedQueue()
        self._shared_lane, self._lonely_lane = _Lane(), _Lane()

    def _rank(self, request: Request) -> float:
        """Tokens that it must compute, those that others wait for too divided among all of them."""
        node = self._trie.node_of(request)
        pages = sum((each.end - each.known) / each.count for each in self._trie.path(node) if each.parent)
        return pages * self._page_size + request.num_tokens - node.end * self._page_size

    def _put(self, request: Request) -> None:
        cost = self._rank(request)
        mine, other = self._shared_lane, self._lonely_lane
        if self._is_lonely(request):
            mine, other = other, mine
            self._queue.discard(request)
            self._lonely.put(request, 0)
        else:
            self._lonely.discard(request)
            self._queue.put(request, cost)
        other.discard(request)
        if not len(mine):
            mine.served = max(mine.served, other.served)
        mine.put(request, cost)

    def _is_lonely(self, request: Request) -> bool:
        """Whether most of its prompt is not in memory and nobody else waits for that."""
        own = sum(
            each.end - each.known for each in self._trie.path(self._trie.node_of(request)) if each.count == 1 and each.parent
        )
        return 2 * own * self._page_size > request.num_tokens

    def discard(self, request: Request) -> None:
        """Let a request go."""
        super().discard(request)
        self._lonely.discard(request)
        self._shared_lane.discard(request)
        self._lonely_lane.discard(request)

    def take(self, request: Request) -> None:
        """Let a request go that was admitted, and charge its lane."""
        waiting = self._shared_lane.waiting + self._lonely_lane.waiting
        for lane in (self._shared_lane, self._lonely_lane):
            before = lane.waiting
            if cost := lane.discard(request):
                lane.served += cost * waiting / before
        self.discard(request)

    def _best(self) -> Request | None:
        shared, lonely = super()._best(), self._lonely.first()
        if shared is None or lonely is None:
            return shared or lonely
        return lonely if self._lonely_lane.served <= self._shared_lane.served else shared
