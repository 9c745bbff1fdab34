"""Who goes first when a tier needs room: an order over that tier's leaves.

An order is a few queues, one for each rank, oldest first, and the lowest rank goes first. A policy is the rank it gives:

    policy     rank                        moved to the back by a use
    lru        0                           yes
    fifo       0                           no
    lfu        number of uses              yes (ties: least recently used)
    slru       1 from the second use on    yes (a probationary and a protected segment)
    priority   the requests' priority      yes (ties: least recently used)

Ticks only grow, so a used leaf goes to the back of its queue in O(1). Only a node that becomes a leaf late, because its
children went, has a tick from the middle; those wait in a heap beside the queues. No operation walks the leaves.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["POLICIES", "EvictionOrder", "LeafOrder", "Policy", "Usage"]

L = TypeVar("L")


class Usage(Struct, gc=False):
    """How a leaf was used in one tier: `tick` of the last use (or of its birth), `hits` so far, `priority` of its requests.

    group: what kind of request used it last, negative if requests branched off there; ends: a request ended with its last page.
    Both are of meaning to `hicache.adaptive` alone.
    """

    tick: int = 0
    hits: int = 0
    priority: int = 0
    group: int = 0
    ends: bool = False

    def absorb(self, child: Usage, *, recency: bool) -> None:
        """Take over what a child that is gone had: uses of a child were uses of its parent, each counted once."""
        if recency and child.tick > self.tick:
            self.tick = child.tick
            if self.group >= 0:
                self.group = child.group
        self.hits += child.hits
        child.hits = 0
        self.priority = max(self.priority, child.priority)


class LeafOrder(Protocol[L]):
    """What the tree asks of the order of one tier's leaves. A leaf is hashed by identity and listed at most once."""

    moves_on_use: bool

    def __len__(self) -> int: ...

    def __contains__(self, leaf: L) -> bool: ...

    def __iter__(self) -> Iterator[L]:
        """All leaves, in no particular order."""
        ...

    def add(self, leaf: L, usage: Usage) -> None:
        """List a leaf, or move it to where its usage now belongs."""
        ...

    def discard(self, leaf: L) -> None:
        """Take a leaf off the list, if it is on it."""
        ...

    def pick(self, may_go: Callable[[L], bool]) -> L | None:
        """The first leaf in order that `may_go`; it stays listed."""
        ...


class Policy(NamedTuple):
    """What tells one eviction policy from another. one_rank: all leaves have rank 0."""

    rank: Callable[[Usage], int]
    moves_on_use: bool = True
    one_rank: bool = False


POLICIES = {
    "lru": Policy(lambda usage: 0, one_rank=True),
    "fifo": Policy(lambda usage: 0, moves_on_use=False, one_rank=True),
    "lfu": Policy(lambda usage: usage.hits),
    "slru": Policy(lambda usage: int(usage.hits >= 2)),
    "priority": Policy(lambda usage: usage.priority),
}


class EvictionOrder(Generic[L]):
    """The leaves of one tier in the order in which they go. Owned by the tree; holds no pages.

    A leaf is hashed by identity and listed at most once.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"eviction policy must be one of {', '.join(POLICIES)}, not {policy}")
        self.policy = POLICIES[policy]
        self.moves_on_use = self.policy.moves_on_use
        self._queues: dict[int, OrderedDict[L, int]] = {}
        self._ranks: list[int] = []  # sorted
        self._home: dict[L, OrderedDict[L, int]] = {}  # queue of each leaf that is in one; left empty where there is only one
        self._late: list[tuple[int, int, int, L]] = []  # (rank, tick, serial, leaf); stale once the leaf moved
        self._entry: dict[L, int] = {}  # serial of a leaf's live heap entry
        self._serial = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values())) + len(self._entry)

    def __contains__(self, leaf: L) -> bool:
        return leaf in self._entry or self._queue_of(leaf) is not None

    def __iter__(self) -> Iterator[L]:
        """All leaves, in no particular order."""
        return chain(self._entry, *self._queues.values())

    def add(self, leaf: L, usage: Usage) -> None:
        """List a leaf, or move it to where its usage now belongs."""
        self.discard(leaf)
        rank, tick = self.policy.rank(usage), usage.tick
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._open_queue(rank)
        if queue and next(reversed(queue.values())) > tick:
            self._push(rank, tick, leaf)
            return
        queue[leaf] = tick
        if not self.policy.one_rank:
            self._home[leaf] = queue

    def discard(self, leaf: L) -> None:
        """Take a leaf off the list, if it is on it."""
        queue = self._queue_of(leaf)
        if queue is None:
            self._entry.pop(leaf, None)
            return
        del queue[leaf]
        self._home.pop(leaf, None)

    def _queue_of(self, leaf: L) -> OrderedDict[L, int] | None:
        """The queue that a leaf is in; None if it waits in the heap or is not listed."""
        if self.policy.one_rank:
            queue = self._queues.get(0)
            return queue if queue is not None and leaf in queue else None
        return self._home.get(leaf)

    def pick(self, may_go: Callable[[L], bool]) -> L | None:
        """The first leaf in order that `may_go`; it stays listed. Leaves that may not go are passed over, not moved.

        Those are the few with an operation in flight, so the walk is short.
        """
        passed: list[tuple[int, int, int, L]] = []
        try:
            for rank in self._ranks:
                for leaf, tick in self._queues[rank].items():
                    late = self._pick_late((rank, tick), may_go, passed)
                    if late is not None:
                        return late
                    if may_go(leaf):
                        return leaf
            return self._pick_late(None, may_go, passed)
        finally:
            for entry in passed:
                heapq.heappush(self._late, entry)

    def _pick_late(
        self, before: tuple[int, int] | None, may_go: Callable[[L], bool], passed: list[tuple[int, int, int, L]]
    ) -> L | None:
        late = self._late
        while late and (before is None or late[0][:2] < before):
            entry = heapq.heappop(late)
            leaf = entry[3]
            if self._entry.get(leaf) != entry[2]:
                continue
            passed.append(entry)
            if may_go(leaf):
                return leaf
        return None

    def _open_queue(self, rank: int) -> OrderedDict[L, int]:
        """A new queue. Those that emptied are dropped now and then: LFU has as many ranks as a leaf has uses."""
        if len(self._ranks) > 16 + 2 * len(self):
            self._queues = {rank: queue for rank, queue in self._queues.items() if queue}
            self._ranks = sorted(self._queues)
        queue = self._queues[rank] = OrderedDict()
        insort(self._ranks, rank)
        return queue

    def _push(self, rank: int, tick: int, leaf: L) -> None:
        if len(self._late) > 64 + 4 * len(self._entry):
            self._late = [entry for entry in self._late if self._entry.get(entry[3]) == entry[2]]
            heapq.heapify(self._late)
        self._serial += 1
        self._entry[leaf] = self._serial
        heapq.heappush(self._late, (rank, tick, self._serial, leaf))
