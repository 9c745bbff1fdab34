"""Ghosts: what is remembered of pages that may have been evicted: how often they were used, and by what kind of request.

A radix tree of its own holds the prefixes of the last requests, resident or not; where the cache's tree has page ids, it has
hit counts. It holds no memory of pages, and its size is bounded in pages.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicache.learner import ABANDONED, Trait, Visit
from hicache.radix_tree import RadixTree

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicache.learner import Learner
    from hicache.radix_tree import Node

    Counts = npt.NDArray[np.int32]

__all__ = ["Ghosts", "Sighting"]

NEAR = 8
"""Nodes above the end of a request whose visits it may have brought back."""


class Sighting(NamedTuple):
    """What is known of a request at arrival.

    group: of its whole path. shared: group of what others share of it, None if that is nothing. abandoned: group of what lies
    behind, if it was a conversation that the request branches off from. goes_on: it is another turn of one conversation.
    counts: how often each page of the prompt was asked for, now included, if that is counted. visit: for `Ghosts.answered`.
    """

    group: int
    shared: int | None
    abandoned: int | None
    goes_on: bool
    counts: Counts | None
    visit: Visit


class Ghosts:
    """Remembers up to `capacity` pages. Owned by the scheduler thread."""

    def __init__(self, page_size: int, capacity: int, learner: Learner, *, counts: bool) -> None:
        self._counts = counts
        self._tree = RadixTree(page_size)
        self._capacity = capacity
        self._learner = learner
        self._visits: dict[Node, Visit] = {}

    def see(self, root_key: bytes, tokens: bytes | bytearray, pages: int, now_us: int) -> Sighting:
        """A request with `pages` whole pages of prompt arrives.

        A request ends one page before its last one here: the next turn often goes on within that page.
        """
        self._learner.tick(now_us)
        size = self._tree.page_key_bytes
        end = max(0, pages - 1) * size
        root = self._tree.hold_root(root_key)
        match = self._tree.match(root, tokens, end)
        whole = match.depth == len(match.node.pages)
        known = self._visits.get(match.node) if whole else None
        node = match.node if whole else self._tree.split(match.node, match.depth)
        tail = end // size - match.pages
        abandoned = self._abandon(match.node) if tail and not whole else None
        goes_on = known is not None and known.group >= 0
        branches = not goes_on and match.pages > 0
        visit = self._visit(known if goes_on else None, tail, forks=branches and known is None)
        visit.last = hash(bytes(tokens[end : end + size]))
        if known is not None and goes_on:
            again = known.last == hash(bytes(tokens[match.pages * size : (match.pages + 1) * size]))
            self._learner.note_end(again)
            if again and not tail:
                visit.last_count = known.last_count + 1
        self._note_returns(node)
        shared = self._share(node) if branches else None
        if tail:
            node.host.group = shared or 0
            node = self._remember(node, tokens[end - tail * size : end], tail)
        self._tree.touch(node, 0, group=0 if tail else shared or 0)
        if node.parent is not None and (tail or not branches):
            self._enter(node, visit)
        counts = self._count(node, pages, visit.last_count) if self._counts else None
        self._tree.drop_root(root)
        return Sighting(visit.group, shared, abandoned, goes_on, counts, visit)

    def answered(self, visit: Visit, tokens: int) -> int:
        """The request of a visit has ended with `tokens` generated; returns its group, now that this is known."""
        return self._regroup(visit, visit.trait.answered(tokens)) if visit.trait is not None else visit.group

    def _abandon(self, node: Node) -> int | None:
        """A request has just branched off before `node`, where a conversation ended; returns the group of that from now on."""
        visit = self._visits.get(node)
        return self._regroup(visit, visit.trait._replace(kind=ABANDONED)) if visit is not None and visit.trait else None

    def _regroup(self, visit: Visit, trait: Trait) -> int:
        visit.trait = trait
        visit.group = self._learner.groups.number(trait)
        self._learner.regroup(visit, visit.group, visit.since_us)
        return visit.group

    def _share(self, node: Node) -> int:
        """Another request branches off at the end of `node`; returns the group of what they share."""
        visit = self._visits.get(node)
        if visit is None:
            visit = Visit(2, self._learner.groups.shared(2, None), self._learner.now_us)
            self._enter(node, visit)
        return visit.group

    def _visit(self, before: Visit | None, tail: int, forks: bool) -> Visit:
        """The visit that a request makes; `before` is the turn it goes on from."""
        now_us = self._learner.now_us
        turn = before.turn + 1 if before is not None else 1
        kind = int(forks) if turn == 1 else 2 if turn == 2 else 3 if turn <= 4 else 4
        trait = Trait.of_request(kind, tail, (now_us - before.since_us) / 1e6 if before is not None else None)
        return Visit(turn, self._learner.groups.number(trait), now_us, trait, last_count=1)

    def _remember(self, node: Node, key: bytes | bytearray, pages: int) -> Node:
        """Add pages after `node`, at the cost of those not used for longest; returns the node that ends there."""
        if not self._make_room(pages, node):
            return node
        visit = self._visits.get(node)
        if visit is not None and visit.group >= 0:
            self._learner.forget(self._visits.pop(node))
        return self._tree.grow(node, key, array("i", bytes(4 * pages)), on_device=False, priority=0)

    def _count(self, node: Node, pages: int, last_count: int) -> Counts:
        """Count one more use of each page up to `node`; returns the counts of the prompt's `pages` pages."""
        out = np.ones(pages, np.int32)
        at = 0
        for each in self._tree.path(node):
            counts = np.frombuffer(each.pages, np.int32)
            counts += 1
            out[at : at + len(counts)] = counts
            at += len(counts)
        if pages and at == pages - 1:
            out[-1] = last_count
        return out

    def _note_returns(self, node: Node) -> None:
        """What ended at `node`, or not far above it, has come back."""
        at: Node | None = node
        for _ in range(NEAR):
            if at is None:
                return
            visit = self._visits.get(at)
            if visit is not None:
                self._learner.returned(visit, visit.group, visit.since_us)
                if visit.group < 0:
                    visit.turn += 1
                    gap_s = (self._learner.now_us - visit.since_us) / 1e6
                    visit.group = self._learner.groups.shared(visit.turn, gap_s)
                visit.since_us = self._learner.now_us
                self._learner.begin(visit, visit.group)
            at = at.parent

    def _enter(self, node: Node, visit: Visit) -> None:
        old = self._visits.get(node)
        if old is not None:
            self._learner.forget(old)
        self._visits[node] = visit
        self._learner.begin(visit, visit.group)

    def _make_room(self, need: int, behind: Node) -> bool:
        """Forget whole leaves until `need` pages fit in behind a node, which stays; whether they do."""
        tree = self._tree
        if need > self._capacity:
            return False
        while tree.host_only_pages + need > self._capacity:
            node = tree.host_order.pick(lambda node: node is not behind)
            if node is None:
                return False
            if node in self._visits:
                self._learner.forget(self._visits.pop(node))
            tree.truncate(node, len(node.pages))
        return True
