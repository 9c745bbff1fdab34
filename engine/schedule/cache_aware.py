"""`cache-aware`: what is cheap to compute goes first, as far as that is fair to the rest.

The cost of a request is the tokens of its prompt that are not in memory. A prefix that several wait for is charged to all of
them in equal parts, so the first of a large cluster, its pioneer, is cheap; its siblings wait until the prefix is there
(`engine.schedule.sharing`), and are cheaper still. Of two requests that arrive together the cheaper one goes first.

Time is counted in tokens served. A request's rank is the time it arrived plus a handicap that grows with its cost and levels
off:

    rank = arrival + HANDICAP * mean * cost / (cost + KNEE * mean)        mean: of the costs of late

So what is cheap overtakes what is dear, but nobody is overtaken for ever: after HANDICAP times the mean cost in tokens served,
all that comes later ranks behind. Among dear requests the order is nearly that of arrival, which keeps the longest waits short.
A request without siblings never counts as dearer than the mean: nobody else gains by what it computes, so that it would be
passed over by all clusters otherwise.

Ideas: pioneers and siblings, and shortest remaining prefill first, from PEEK (arXiv 2607.02525) and Strata (OSDI '26); service
as time, from stride scheduling (Waldspurger and Weihl, 1995).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.schedule.prefixes import PrefixOrder

if TYPE_CHECKING:
    from engine.request import Request
    from hicache.cache import HiCache

__all__ = ["CacheAware"]

HANDICAP = 200.0
KNEE = 0.3
LATE = 1000
"""Requests over which the mean cost is taken, about."""


class CacheAware(PrefixOrder):
    """Cheapest first, with a handicap that is bounded; a shared prefix costs each sibling a part."""

    def __init__(self, cache: HiCache) -> None:
        super().__init__(cache)
        self._page_size = cache.geometry.page_size
        self._served = 0.0
        self._seen = 0
        self._mean = 0.0

    def add(self, request: Request) -> None:
        """Take a request in; a returning one keeps its time of arrival."""
        super().add(request)
        if request.noted is None:
            request.noted = self._served
            self._seen += 1
            self._mean += (self._alone_cost(request) - self._mean) / min(self._seen, LATE)
            self._queue.put(request, self._rank(request))

    def take(self, request: Request) -> None:
        """Let a request go that was admitted: what it computes is served."""
        self._served += self._alone_cost(request)
        super().take(request)

    def _rank(self, request: Request) -> float:
        cost, mean = self._cost(request), max(1.0, self._mean)
        return (request.noted or 0.0) + HANDICAP * mean * cost / (cost + KNEE * mean)

    def _alone_cost(self, request: Request) -> int:
        """Tokens that it would compute if nobody shared them; at least one."""
        return request.num_tokens - self._trie.known_pages(request) * self._page_size

    def _cost(self, request: Request) -> float:
        """Its tokens that are not in memory, those that others wait for too divided by their number."""
        end = self._trie.node_of(request)
        cost = float(request.num_tokens - end.end * self._page_size)
        own = cost
        for node in self._trie.path(end):
            tokens = (node.end - node.known) * self._page_size
            if tokens:
                cost += tokens / node.count
                own += tokens if node.count == 1 else 0
        return min(cost, self._mean) if 2 * own > request.num_tokens else cost
