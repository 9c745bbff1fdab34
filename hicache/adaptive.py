"""The eviction policy `adaptive`: learns from the traffic when a prefix comes back, and lets go what is worth least.

What a leaf is worth follows from its group (what kind of request used it last, see `hicache.learner`) and its age. The last
page of a request is worth as much less as it comes back more rarely than what is before it. When room is needed, some leaves
are ranked at once and go one by one; those that were used meanwhile drop out. So the work for a victim is bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from hicache.ages import OCTAVES, Ages, octaves_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from hicache.eviction import Usage
    from hicache.learner import Learner

__all__ = ["AdaptiveOrder"]

L = TypeVar("L")

PART = 64
"""One leaf of so many is ranked for eviction at a time, and LEAST more."""

LEAST = 4

WINDOW = 1 << 16
"""Leaves that are looked at for that, at most."""


class AdaptiveOrder(Generic[L]):
    """The leaves of one tier in the order in which they go, least worth first: a `LeafOrder`."""

    moves_on_use = True

    def __init__(self, learner: Learner) -> None:
        self._leaves: Ages[L] = Ages()  # code: 2 x group, 1 more if a request ended with the last page
        self._learner = learner
        self._next: dict[L, None] = {}  # ranked, first to go first; has no leaf that changed since
        self._window = 0

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, leaf: L) -> bool:
        return leaf in self._leaves

    def __iter__(self) -> Iterator[L]:
        return iter(self._leaves)

    def add(self, leaf: L, usage: Usage) -> None:
        """List a leaf, or move it to where its usage now belongs."""
        if self._leaves.put(leaf, usage.tick, 2 * usage.group + usage.ends):
            self._next.pop(leaf, None)

    def discard(self, leaf: L) -> None:
        """Take a leaf off the list, if it is on it."""
        self._leaves.discard(leaf)
        self._next.pop(leaf, None)

    def pick(self, may_go: Callable[[L], bool]) -> L | None:
        """The first leaf in order that `may_go`; it stays listed."""
        for leaf in self._next:
            if may_go(leaf):
                return leaf
        self._next = dict.fromkeys(self._ranked(LEAST + len(self._leaves) // PART))
        for leaf in self._next:
            if may_go(leaf):
                return leaf
        return next((leaf for leaf in self._ranked(len(self._leaves)) if may_go(leaf)), None)

    def _ranked(self, count: int) -> list[L]:
        """The `count` leaves that are worth least, of as many as are looked at; of all, if that many are asked for."""
        total, first = len(self._leaves), 0
        if count < total and total > WINDOW:
            first = self._window = self._window + WINDOW if self._window + WINDOW < total else 0
            count = WINDOW // PART
            total = min(total, first + WINDOW)
        worth = self._worth(first, total)
        least = np.argpartition(worth, count)[:count] if count < len(worth) else np.arange(len(worth))
        order = first + least[np.argsort(worth[least], kind="stable")]
        return [self._leaves.at(row) for row in order.tolist()]

    def _worth(self, first: int, end: int) -> npt.NDArray[np.floating] | npt.NDArray[np.int64]:
        """What leaves [first, end) are worth; before anything was learned, when they were used."""
        since_us, code = self._leaves.columns()
        since_us, code = since_us[first:end], code[first:end]
        table = self._learner.worth()
        if table is None:
            return since_us.copy()
        ages = octaves_of(self._learner.now_us - since_us)
        cells = ages.astype(np.int64)
        ages -= cells
        at = code * (OCTAVES + 1) + cells
        flat = table.ravel()
        low = flat.take(at)
        return low + ages * (flat.take(at + 1) - low)
