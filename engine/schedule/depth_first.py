"""`dfs-weight`: the tree of waiting prompts, depth first, the branch with the most requests first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from engine.schedule.trie import PromptTrie, TrieNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.request import Request
    from hicache.cache import HiCache

__all__ = ["DepthFirst"]

Heap = list[tuple[int, int, TrieNode]]

SLACK = 64


class DepthFirst:
    """Finishes a branch before it begins the next. A request goes before those whose prompts continue its own.

    Depth first makes every shared prefix computed once, if the cache holds the longest request (theorem 3.1 of RadixAttention,
    Zheng et al., arXiv 2312.07104). The walk goes on from the last admission, in whatever branches there are by then.
    """

    def __init__(self, cache: HiCache) -> None:
        self._trie = PromptTrie(cache.geometry.page_size)
        self._at = self._trie.top
        self._heaviest: dict[TrieNode, Heap] = {}  # of nodes whose children were looked at

    def add(self, request: Request) -> None:
        """Take a request in."""
        for node in self._trie.path(self._trie.add(request, self._trie.full_pages(request.lease))):
            if node.parent in self._heaviest:
                heap = self._heaviest[node.parent]
                heappush(heap, _entry(node))
                if len(heap) > 2 * len(node.parent.children) + SLACK:
                    del self._heaviest[node.parent]  # mostly outdated; made anew when needed

    def discard(self, request: Request) -> None:
        """Let a request go."""
        if request not in self._trie:
            return
        gone = [node for node in self._trie.path(self._trie.node_of(request)) if node.count == 1]
        left = self._trie.discard(request)
        assert left is not None
        for node in gone:
            self._heaviest.pop(node, None)
            if node is self._at:
                self._at = left

    def take(self, request: Request) -> None:
        """Let a request go that was admitted, and go on from there."""
        self._at = self._trie.node_of(request)
        self.discard(request)

    def first(self, running: Sequence[Request]) -> Request | None:
        """Who goes next."""
        if not len(self._trie):
            return None
        node = self._at
        while not node.requests:
            node = self._heaviest_child(node)
        return next(iter(node.requests))

    def landed(self, request: Request) -> None:
        """The order depends on the waiting alone."""

    def _heaviest_child(self, node: TrieNode) -> TrieNode:
        """The child with the most requests; of equals the oldest."""
        heap = self._heaviest.get(node)
        if heap is None:
            heap = self._heaviest[node] = [_entry(child) for child in node.children.values()]
            heapify(heap)
        while True:
            entry = heap[0]
            child = entry[2]
            if child.parent is not node or not child.count:
                heappop(heap)
            elif entry == _entry(child):
                return child
            else:
                heapreplace(heap, _entry(child))


def _entry(node: TrieNode) -> tuple[int, int, TrieNode]:
    return -node.count, node.order, node
