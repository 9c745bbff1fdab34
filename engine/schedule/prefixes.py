"""Policies that look at the cache: what of a prompt is in memory, and who else waits for the rest.

Ranks are kept up to date without matching everybody at every step. What a step brings into memory is followed down the trie of
waiting prompts, and only those below are ranked anew, so many a step. What is evicted is not followed: it can only make a rank
worse, which is found when the request comes up, before it goes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from engine.schedule.ranked import RankedQueue
from engine.schedule.trie import PromptTrie

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.request import Request
    from hicache.cache import HiCache

__all__ = ["LongestPrefixMatch", "PrefixOrder"]

RERANKED = 256
"""Requests ranked anew at most whenever somebody asks who goes next."""
CORRECTED = 64
"""Requests whose rank turned out worse, at most, before the best one known is taken as it is."""


class PrefixOrder(ABC):
    """By a rank that depends on what of a prompt is in memory, the lowest first; ties by arrival."""

    def __init__(self, cache: HiCache) -> None:
        self._cache = cache
        self._trie = PromptTrie(cache.geometry.page_size)
        self._queue = RankedQueue()
        self._changed: dict[Request, None] = {}

    @abstractmethod
    def _rank(self, request: Request) -> float:
        """The rank of a request in the trie, by what the trie knows."""

    def add(self, request: Request) -> None:
        """Take a request in: match it once."""
        self._trie.add(request, self._trie.reusable_pages(request.lease))
        self._trie.learn(request, self._cache.cached_pages(request.lease))
        self._queue.put(request, self._rank(request))

    def discard(self, request: Request) -> None:
        """Let a request go."""
        self._trie.discard(request)
        self._queue.discard(request)
        self._changed.pop(request, None)

    def take(self, request: Request) -> None:
        """Let a request go that was admitted."""
        self.discard(request)

    def landed(self, request: Request) -> None:
        """Note whose prefix has grown."""
        if len(self._trie) and (node := self._trie.landed(request.lease, request.lease.shared)):
            self._changed.update(dict.fromkeys(self._trie.below(node)))

    def first(self, running: Sequence[Request]) -> Request | None:
        """Who goes next."""
        for _ in range(min(RERANKED, len(self._changed))):
            changed, _ = self._changed.popitem()
            self._queue.put(changed, self._rank(changed))
        for _ in range(CORRECTED):
            request = self._queue.first()
            if request is None or not self._got_worse(request):
                return request
        return self._queue.first()

    def _got_worse(self, request: Request) -> bool:
        """Match a request again and rank it by that; whether it had been ranked too well."""
        before = self._queue.rank(request)
        self._trie.learn(request, self._cache.cached_pages(request.lease))
        now = self._rank(request)
        self._queue.put(request, now)
        return now > before


class LongestPrefixMatch(PrefixOrder):
    """`lpm`: the longest prefix in memory first."""

    def _rank(self, request: Request) -> float:
        return -self._trie.known_pages(request)
