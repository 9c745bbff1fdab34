"""A radix trie of prompts that are waiting or being computed: who shares which pages with whom.

A node stands for pages [start, end) of every prompt that runs through it.

    start ............ known ............ end
      in memory, so far   not computed yet
      as was found
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.request import Request
    from hicache.lease import Lease

__all__ = ["Common", "PromptTrie", "TrieNode"]


class TrieNode:
    """Pages [start, end) of the prompts below it. `count`: prompts that end here or below; a node without any is gone.

    tokens: a prompt that ran through here, borrowed: leases only append to theirs. known: end of the pages that were found in
    memory. children: by `key`, the tokens of their first page (below the top: the namespace). order: of creation.
    """

    __slots__ = ("children", "count", "end", "key", "known", "order", "parent", "requests", "start", "tokens")

    def __init__(self, parent: TrieNode | None, key: object, tokens: bytearray, start: int, end: int, order: int) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.start = start
        self.end = end
        self.known = start
        self.order = order
        self.count = 0
        self.children: dict[object, TrieNode] = {}
        self.requests: dict[Request, None] = {}


class Common(NamedTuple):
    """Where a walk ended: `pages` pages are common to the prompt walked along and all below `node`."""

    node: TrieNode
    pages: int


class PromptTrie:
    """Prompts by their pages. A call costs a comparison of the prompt's bytes, whatever the number of prompts."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page = 4 * page_size
        self._made = 0
        self._where: dict[Request, TrieNode] = {}
        self.top = TrieNode(None, None, bytearray(), 0, 0, 0)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request: object) -> bool:
        return request in self._where

    # ---- prompts

    def reusable_pages(self, lease: Lease) -> int:
        """Pages of its tokens that it could reuse: a token comes after them, since the last one is computed in any case."""
        return min(lease.num_tokens - 1, lease.max_cached_tokens) // self._page_size

    def full_pages(self, lease: Lease) -> int:
        """Pages of its tokens that others could reuse once it has computed them."""
        return lease.num_tokens // self._page_size

    def add(self, request: Request, pages: int) -> TrieNode:
        """Add the first `pages` pages of a prompt that is not in here; returns the node it ends at."""
        lease = request.lease
        node, at = self.walk(lease, pages)
        if node is self.top:
            node = self._attach(node, lease.root, lease.tokens, 0, 0)
        if at < node.end:
            node = self._split(node, at)
        if at < pages:
            node = self._attach(node, self._first_page(lease.tokens, at), lease.tokens, at, pages)
        node.requests[request] = None
        self._where[request] = node
        for each in self.path(node):
            each.count += 1
        return node

    def discard(self, request: Request) -> TrieNode | None:
        """Remove a prompt; returns the deepest node on its way that is left. None if it was not in here."""
        node = self._where.pop(request, None)
        if node is None:
            return None
        del node.requests[request]
        for each in self.path(node):
            each.count -= 1
        while node.parent is not None and not node.count:
            del node.parent.children[node.key]
            node, gone = node.parent, node
            gone.parent = None
        return node

    def node_of(self, request: Request) -> TrieNode:
        """The node a prompt ends at."""
        return self._where[request]

    # ---- looking

    def walk(self, lease: Lease, pages: int) -> Common:
        """Follow the first `pages` pages of a prompt as far as another one has them too."""
        node, at = self.top.children.get(lease.root), 0
        if node is None:
            return Common(self.top, 0)
        while at < pages:
            child = node.children.get(self._first_page(lease.tokens, at))
            if child is None:
                break
            node, at = child, self._common_end(child, lease.tokens, min(child.end, pages))
            if at < child.end:
                break
        return Common(node, at)

    @staticmethod
    def path(node: TrieNode) -> Iterator[TrieNode]:
        """`node` and its ancestors, the top last."""
        at: TrieNode | None = node
        while at is not None:
            yield at
            at = at.parent

    @staticmethod
    def below(node: TrieNode) -> Iterator[Request]:
        """Every prompt that ends at `node` or below."""
        stack = [node]
        while stack:
            node = stack.pop()
            yield from node.requests
            stack.extend(node.children.values())

    # ---- what is in memory

    def learn(self, request: Request, pages: int) -> None:
        """Exactly the first `pages` pages of a prompt in here are in memory."""
        for node in self.path(self._where[request]):
            node.known = min(node.end, max(node.start, pages))

    def known_pages(self, request: Request) -> int:
        """How many of a prompt's first pages are in memory, as far as is known."""
        known = self._where[request].end
        for node in self.path(self._where[request]):
            if node.known < node.end:
                known = node.known
        return known

    def landed(self, lease: Lease, pages: int) -> TrieNode | None:
        """The first `pages` pages of some prompt are in memory now; returns the node from which on that was news."""
        node, at = self.top.children.get(lease.root), 0
        news: TrieNode | None = None
        while node is not None and at < pages:
            child = node.children.get(self._first_page(lease.tokens, at))
            if child is None:
                break
            node, at = child, self._common_end(child, lease.tokens, min(child.end, pages))
            if at > child.known:
                child.known = at
                news = news or child
            if at < child.end:
                break
        return news

    # ---- helpers

    def _first_page(self, tokens: bytearray, at: int) -> bytes:
        return bytes(tokens[at * self._page : (at + 1) * self._page])

    def _common_end(self, node: TrieNode, tokens: bytearray, end: int) -> int:
        """Where `tokens` and the pages of `node` part, at the latest at `end`."""
        first, last = node.start * self._page, end * self._page
        mine, theirs = node.tokens[first:last], tokens[first:last]
        if mine == theirs:
            return end
        differ = np.frombuffer(mine, np.int32) != np.frombuffer(theirs, np.int32)
        return node.start + int(differ.argmax()) // self._page_size

    def _attach(self, parent: TrieNode, key: object, tokens: bytearray, start: int, end: int) -> TrieNode:
        self._made += 1
        node = parent.children[key] = TrieNode(parent, key, tokens, start, end, self._made)
        return node

    def _split(self, node: TrieNode, at: int) -> TrieNode:
        """Cut `node` at page `at`, inside it, and return the new upper half; `node` itself becomes the lower half."""
        assert node.start < at < node.end
        assert node.parent is not None
        upper = self._attach(node.parent, node.key, node.tokens, node.start, at)
        node.key = self._first_page(node.tokens, at)
        upper.children[node.key] = node
        upper.count = node.count
        upper.known = min(node.known, at)
        node.parent, node.start, node.known = upper, at, max(node.known, at)
        return upper
