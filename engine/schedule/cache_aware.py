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

if TYPE_CHECKING:

    from engine.request import Request
    from hicache.cache import HiCache

__all__ = ["CacheAware"]


class CacheAware(PrefixOrder):
    """Least shared cost first; a lane by arrival for those without siblings."""

    def __init__(self, cache: HiCache) -> None:
        super().__init__(cache)
        self._page_size = cache.geometry.page_size

    def _rank(self, request: Request) -> float:
        """Tokens that it must compute, those that others wait for too divided among all of them."""
        node = self._trie.node_of(request)
        pages = sum((each.end - each.known) / each.count for each in self._trie.path(node) if each.parent)
        return pages * self._page_size + request.num_tokens - node.end * self._page_size
