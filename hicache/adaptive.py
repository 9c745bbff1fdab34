"""The eviction policy `adaptive`: learns from the traffic when a prefix comes back, and lets go what is worth least.

What a leaf is worth follows from its group (what kind of request used it last) and its age (time since then), counted in half
octaves. For each group and age the `Learner` counts returns and time at risk, of what was evicted too (`hicache.ghosts`); their
ratio is the hazard of a return. The worth is Gittins' index: the largest, over horizons, of the chance of a
return by then over the expected time until then or the return.

    groups     kind x new tail: kind is first turn, fork of a conversation, second, third to fourth, later turn; the pages of
               the tail are counted in octaves
               SHARED, a prefix that requests branched off from
               ENDS, last pages of requests, while those rarely come back with the rest (a conversation goes on within them)

A tier keeps its leaves in cells, one for each group and age; the least of the cells that are not empty goes first, in it the
oldest leaf. Aging moves a leaf from cell to cell, about once an octave. No operation walks the leaves.

Ideas: reuse time by class of request (Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025); index: Gittins, "Bandit
processes and dynamic allocation indices", 1979.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from hicache.eviction import Usage

__all__ = ["GROUPS", "OCTAVES", "AdaptiveOrder", "Learner"]

L = TypeVar("L")

KINDS = 5  # first turn; fork of a conversation; second turn; third and fourth; later
TAILS = 12
GROUPS = KINDS * TAILS + 2  # the last two: ENDS, which is -2, and SHARED, which is -1
ENDS = -2
STEPS = 2
OCTAVES = 44
CELLS = GROUPS * OCTAVES
EPOCH = 64
"""Requests between two computations of the worth."""

AGING = 32
"""Requests between two looks at what has outgrown its cell."""

WARM_UP = 4
"""Epochs of plain LRU before what was learned is used."""

DECAY = 0.99
END_WEIGHT = 0.02
RARE = 0.5
"""Share of returns below which last pages are a group of their own."""

PRIOR = 20.0
"""Returns that the expectation counts for in each cell."""

GROUP_PRIOR = 5.0
"""Returns that the average group counts for in each group."""

_UPPER_US = [int(1e6 * 2 ** (octave / STEPS)) for octave in range(OCTAVES)]
_WIDTH_S = [1.0] + [2.0 ** (octave / STEPS) - 2.0 ** ((octave - 1) / STEPS) for octave in range(1, OCTAVES)]


def octave_of(age_us: int) -> int:
    """The octave of an age in microseconds."""
    return bisect_right(_UPPER_US, age_us, 0, OCTAVES - 1)


def group_of(kind: int, tail_pages: int) -> int:
    """The group of a request by its kind and by how many pages are new."""
    return kind * TAILS + min(tail_pages.bit_length(), TAILS - 1)


class Cells(Generic[L]):
    """Things by group and octave of age. An item is hashed by identity and listed at most once.

    Each cell is a heap of (since_us, serial, item), oldest first; entries whose item has moved on are stale. `occupied` has a 1
    for each cell that is not empty, in the order that `arrange` was given, so that the first one is found at once.
    """

    def __init__(self) -> None:
        self.live = [0] * CELLS
        self.occupied = bytearray(CELLS)
        self._ranking = self._places = list(range(CELLS))
        self._heaps: list[list[tuple[int, int, L]]] = [[] for _ in range(CELLS)]
        self._home: dict[L, tuple[int, int]] = {}  # cell, and serial of the item's live entry
        self._serial = 0

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, item: L) -> bool:
        return item in self._home

    def __iter__(self) -> Iterator[L]:
        return iter(self._home)

    def add(self, item: L, group: int, since_us: int, now_us: int) -> None:
        """List an item last used at `since_us`, or move it."""
        self.discard(item)
        self._serial += 1
        self._enter(group % GROUPS * OCTAVES + octave_of(now_us - since_us), since_us, self._serial, item)

    def discard(self, item: L) -> None:
        """Take an item out, if it is in."""
        home = self._home.pop(item, None)
        if home is None:
            return
        cell = home[0]
        self._left(cell)
        heap = self._heaps[cell]
        if len(heap) > 64 + 2 * self.live[cell]:
            heap[:] = [entry for entry in heap if self._is_live(entry)]
            heapq.heapify(heap)

    def first(self, cell: int, may_go: Callable[[L], bool]) -> tuple[int, int, L] | None:
        """The entry of the oldest item of a cell that `may_go`."""
        heap, found = self._heaps[cell], None
        passed = []
        while heap:
            entry = heap[0]
            if self._is_live(entry):
                if may_go(entry[2]):
                    found = entry
                    break
                passed.append(entry)
            heapq.heappop(heap)
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def arrange(self, ranking: list[int]) -> None:
        """Put the cells into this order. ranking: every cell number once; stays the caller's, who leaves it as it is."""
        self._ranking = ranking
        self._places = np.argsort(ranking).tolist()
        self.occupied[:] = (np.array(self.live)[ranking] > 0).tobytes()

    def filled(self) -> Iterator[int]:
        """The cells that are not empty, in order. Cells may be filled or emptied meanwhile."""
        place = self.occupied.find(1)
        while place >= 0:
            yield self._ranking[place]
            place = self.occupied.find(1, place + 1)

    def age(self, now_us: int) -> None:
        """Move what has outgrown its cell."""
        for cell in self.filled():
            self._age_cell(cell, now_us)

    def _age_cell(self, cell: int, now_us: int) -> None:
        heap, (group, octave) = self._heaps[cell], divmod(cell, OCTAVES)
        born_before = now_us - _UPPER_US[octave]
        while heap and heap[0][0] <= born_before and octave < OCTAVES - 1:
            since_us, serial, item = entry = heapq.heappop(heap)
            if self._is_live(entry):
                self._left(cell)
                self._enter(group * OCTAVES + octave_of(now_us - since_us), since_us, serial, item)

    def _is_live(self, entry: tuple[int, int, L]) -> bool:
        home = self._home.get(entry[2])
        return home is not None and home[1] == entry[1]

    def _enter(self, cell: int, since_us: int, serial: int, item: L) -> None:
        heapq.heappush(self._heaps[cell], (since_us, serial, item))
        self.live[cell] += 1
        self.occupied[self._places[cell]] = 1
        self._home[item] = (cell, serial)

    def _left(self, cell: int) -> None:
        self.live[cell] -= 1
        if not self.live[cell]:
            self.occupied[self._places[cell]] = 0


class Learner:
    """Counts returns and time at risk; says what each cell is worth. Owned by the scheduler thread.

    Told of every visit: `begin` when something was used and may come back, `returned` when it did.
    """

    def __init__(self) -> None:
        self.now_us = 0
        self.end_share = 1.0  # of returns that bring the last page back
        self.ranking: list[int] = []  # cells, least worth first; empty until enough was seen
        self._orders: list[Cells[object]] = []
        self._returns = np.zeros((GROUPS, OCTAVES))
        self._risk_s = np.zeros((GROUPS, OCTAVES))
        self._visits: Cells[object] = Cells()
        self._counted_us = 0
        self._requests = 0

    def keep_aging(self, cells: Cells[L]) -> None:
        """Move the leaves in `cells` from cell to cell from now on."""
        self._orders.append(cells)  # type: ignore[arg-type]

    def tick(self, now_us: int) -> None:
        """A request arrives at `now_us`."""
        self.now_us = max(self.now_us, now_us)
        self._requests += 1
        if self._requests % AGING == 0:
            self._count_risk()
            for cells in self._orders:
                cells.age(self.now_us)
        if self._requests % EPOCH == 0:
            self._learn()

    def begin(self, visit: object, group: int) -> None:
        """Something was used just now by a request of this group."""
        self._visits.add(visit, group, self.now_us, self.now_us)

    def returned(self, visit: object, group: int, since_us: int) -> None:
        """It was used again."""
        self._visits.discard(visit)
        self._returns[group, octave_of(self.now_us - since_us)] += 1

    def note_end(self, came_back: bool) -> None:
        """A request came back; whether it did so with its last page."""
        self.end_share += END_WEIGHT * (came_back - self.end_share)

    def forget(self, visit: object) -> None:
        """It can't be told any more whether it comes back."""
        self._visits.discard(visit)

    def _count_risk(self) -> None:
        lapse_s = (self.now_us - self._counted_us) / 1e6
        self._counted_us = self.now_us
        self._visits.age(self.now_us)
        self._risk_s += np.array(self._visits.live, float).reshape(GROUPS, OCTAVES) * lapse_s

    def _learn(self) -> None:
        if self._requests >= WARM_UP * EPOCH:
            worth = worth_of(self._hazards())
            worth[ENDS] *= self.end_share
            self.ranking = np.argsort(worth.ravel(), kind="stable").tolist()
            for cells in self._orders:
                cells.arrange(self.ranking)
        self._returns *= DECAY
        self._risk_s *= DECAY

    def _hazards(self) -> npt.NDArray[np.float64]:
        """Returns a second of each cell: what was seen, where that is little what the group and the octave let expect."""
        pooled = self._pooled()
        expected = self._risk_s @ pooled
        of_group = (self._returns.sum(1) + GROUP_PRIOR) / (expected + GROUP_PRIOR)
        likely = np.outer(of_group, pooled)
        return (self._returns + PRIOR) / (self._risk_s + PRIOR / likely)

    def _pooled(self) -> npt.NDArray[np.float64]:
        """Hazard a second by octave, of all groups. Where little was seen: half that of the octave before."""
        returns, risk_s = self._returns[:-1].sum(0), self._risk_s[:-1].sum(0)  # what is shared is a kind of its own
        hazard = (returns.sum() + 1.0) / (risk_s.sum() + 1.0)
        out = np.empty(OCTAVES)
        for octave in range(OCTAVES):
            out[octave] = hazard = (returns[octave] + 5.0) / (risk_s[octave] + 5.0 / hazard)
            hazard /= 2 ** (1 / STEPS)
        return out


def worth_of(hazard: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Gittins' index at the start of each octave. hazard: a second, float64 (groups, octaves)."""
    lasting = np.array(_WIDTH_S) * hazard
    spent = np.cumsum(lasting, axis=1) - lasting  # cumulative hazard at the start of each octave
    later = np.arange(OCTAVES) >= np.arange(OCTAVES)[:, None]
    alive = np.exp(-np.where(later, spent[:, None, :] - spent[:, :, None], np.inf))  # (groups, start, octave)
    lost = alive * -np.expm1(-lasting)[:, None, :]
    hits = np.cumsum(lost, axis=2)
    time_s = np.cumsum(lost / hazard[:, None, :], axis=2)
    rate = np.divide(hits, time_s, out=np.zeros_like(hits), where=later)
    return np.asarray(rate.max(axis=2))


class AdaptiveOrder(Generic[L]):
    """The leaves of one tier in the order in which they go, least worth first: a `LeafOrder`."""

    moves_on_use = True

    def __init__(self, learner: Learner) -> None:
        self._cells: Cells[L] = Cells()
        self._learner = learner
        learner.keep_aging(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, leaf: L) -> bool:
        return leaf in self._cells

    def __iter__(self) -> Iterator[L]:
        return iter(self._cells)

    def add(self, leaf: L, usage: Usage) -> None:
        """List a leaf, or move it to where its usage now belongs."""
        rare_end = usage.ends and self._learner.end_share < RARE
        self._cells.add(leaf, ENDS if rare_end else usage.group, usage.tick, self._learner.now_us)

    def discard(self, leaf: L) -> None:
        """Take a leaf off the list, if it is on it."""
        self._cells.discard(leaf)

    def pick(self, may_go: Callable[[L], bool]) -> L | None:
        """The first leaf in order that `may_go`; it stays listed."""
        if not self._learner.ranking:
            return self._oldest(may_go)
        for cell in self._cells.filled():
            entry = self._cells.first(cell, may_go)
            if entry is not None:
                return entry[2]
        return None

    def _oldest(self, may_go: Callable[[L], bool]) -> L | None:
        fronts = [entry for cell in self._cells.filled() if (entry := self._cells.first(cell, may_go)) is not None]
        return min(fronts)[2] if fronts else None
