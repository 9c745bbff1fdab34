"""What users know and a cache can't guess: bring this prefix up, keep it for a while, let it go.

A hint never does harm: one that can't be followed does nothing, and pins are given up, the soonest to end first, as soon as a
request lacks room for them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicache.page_table import NOWHERE, STORED
from hicache.radix_tree import Match, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.keys import Namespace
    from hicache.lease import Lease
    from hicache.tiers import Tiers

__all__ = ["Hints"]

PIN_SHARE = 0.25
"""Share of the device pool's pages that pins may cover together, in any tier."""
MOST_PREFETCHES = 64
"""Prefetches by hint that run at once; more are not begun."""


@dataclass(slots=True, eq=False)
class _Pin:
    """A prefix that is kept until `until_s`. `pages` counts those of its path."""

    node: Node
    pages: int
    until_s: float


class Hints:
    """Follows hints. Part of the cache, so on the scheduler's thread; `tick` runs at every step.

    open_lease, release: the cache's own.
    """

    def __init__(
        self, tiers: Tiers, open_lease: Callable[[Sequence[int], Namespace], Lease], release: Callable[[Lease], None]
    ) -> None:
        self._t = tiers
        self._open = open_lease
        self._release = release
        self._most_pinned = int(PIN_SHARE * tiers.config.device_pages)
        self._pins: dict[bytes, _Pin] = {}  # by the key of the prefix's last page
        self._coming: list[Lease] = []

    # ---- hints

    def prefetch(self, tokens: Sequence[int], namespace: Namespace) -> int:
        """Begin to bring full pages of a prefix from disk to host; returns the tokens that are in memory already."""
        if not self._t.config.reuse:
            return 0
        if len(self._coming) >= MOST_PREFETCHES:
            return self._find(tokens, namespace).pages * self._t.geometry.page_size
        lease = self._open([*tokens, 0], namespace)  # one token more: a lease leaves the last one to be computed
        lease.to_host = True
        if lease.prefetch is None:
            self._release(lease)
        else:
            self._coming.append(lease)
        return sum(lease.found[:2]) * self._t.geometry.page_size

    def pin(self, tokens: Sequence[int], namespace: Namespace, ttl_s: float) -> int:
        """Keep what is in memory of a prefix where it is for `ttl_s` seconds; returns how many tokens that are.

        A prefix that is pinned already is kept for the longer time of both. Beyond the share of the pool, less or none is kept.
        """
        t = self._t
        self._expire()
        match = self._find(tokens, namespace)
        until_s = t.clock() + ttl_s
        known = self._pins.get(t.key_at(match.node, match.depth)) if match.pages else None
        if known is not None:
            known.until_s = max(known.until_s, until_s)
            return known.pages * t.geometry.page_size
        match = self._find(tokens, namespace, min(match.pages, self._most_pinned - self.pinned_pages))
        if not match.pages:
            return 0
        node = self._ends_at(match)
        t.tree.pin(node)
        self._pins[t.key_at(node, len(node.pages))] = _Pin(node, match.pages, until_s)
        return match.pages * t.geometry.page_size

    def demote(self, tokens: Sequence[int], namespace: Namespace) -> int:
        """Take a prefix, and what continues it, off the device where there is a lower copy; returns the tokens that went.

        Pages stay that somebody uses or has pinned, that have no lower copy, or that other prefixes on the device need.
        """
        t = self._t
        match = self._find(tokens, namespace)
        if match.pages < len(tokens) // t.geometry.page_size or not match.pages:
            return 0
        gone = 0
        below = [match.node]
        for node in below:
            below.extend(node.child_list())
        for node in reversed(below[1:]):
            gone += self._leave_device(node)
        node = match.node
        while node.parent is not None:
            parent = node.parent  # read first: a node that is forgotten leaves the tree
            gone += self._leave_device(node)
            node = parent
        return gone * t.geometry.page_size

    # ---- upkeep

    @property
    def pinned_pages(self) -> int:
        """Pages of all pinned prefixes; one that several share counts for each."""
        return sum(pin.pages for pin in self._pins.values())

    @property
    def pins(self) -> int:
        """Prefixes that are pinned."""
        return len(self._pins)

    @property
    def prefetches(self) -> int:
        """Prefetches by hint that have not ended."""
        return len(self._coming)

    def tick(self) -> None:
        """End what is over: prefetches that have landed, pins whose time is up."""
        if self._coming:
            for lease in [lease for lease in self._coming if self._is_over(lease)]:
                self._coming.remove(lease)
                self._release(lease)
        if self._pins:
            self._expire()

    def give_up(self) -> bool:
        """Give up the pin that ends soonest, since somebody needs the room; False if there is none."""
        if not self._pins:
            return False
        self._unpin(min(self._pins, key=lambda key: self._pins[key].until_s))
        return True

    def clear(self) -> None:
        """Give up everything."""
        while self.give_up():
            pass
        for lease in self._coming:
            self._release(lease)
        self._coming.clear()

    # ---- helpers

    def _is_over(self, lease: Lease) -> bool:
        prefetch = lease.prefetch
        return prefetch is None or prefetch.finished or self._t.clock() >= prefetch.deadline_s

    def _expire(self) -> None:
        now_s = self._t.clock()
        for key in [key for key, pin in self._pins.items() if pin.until_s <= now_s]:
            self._unpin(key)

    def _unpin(self, key: bytes) -> None:
        self._t.tree.unpin(self._pins.pop(key).node)

    def _find(self, tokens: Sequence[int], namespace: Namespace, most_pages: int | None = None) -> Match:
        """What is in memory of the full pages of a prefix. Counts as no use."""
        t = self._t
        root = t.tree.roots.get(t.chain.root(namespace))
        if root is None:
            return Match(Node(None, bytearray(), array("i"), 0, 0), 0, 0, 0)
        pages = len(tokens) // t.geometry.page_size
        end = (pages if most_pages is None else max(0, min(pages, most_pages))) * t.tree.page_key_bytes
        return t.tree.match(root, np.asarray(tokens, np.int32).tobytes(), end)

    def _ends_at(self, match: Match) -> Node:
        if match.depth == len(match.node.pages):
            return match.node
        return self._t.tree.split(match.node, match.depth)

    def _leave_device(self, node: Node) -> int:
        """Drop device copies from the end of a node's device part on, as far as they may go; returns how many went."""
        t, gone = self._t, 0
        while node.parent is not None and node.device_len and not node.users and not node.device_children:
            page, end = node.pages[node.device_len - 1], node.device_len
            if t.table.device_busy[page]:
                break
            bare = not node.children and end == len(node.pages) and t.table.store[page] == STORED
            if t.table.host_slot[page] != NOWHERE:
                t.demote(node, 1)
            elif bare and not t.table.host_busy[page]:
                t.forget(node, 1)
            else:
                break
            gone += 1
        t.metrics.evicted_pages.labels("device").inc(gone)
        return gone
