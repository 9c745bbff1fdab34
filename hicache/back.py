"""The back of a hit: what has landed of the pages that are read from disk from the last to the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Slots = npt.NDArray[np.int32]
    Flags = npt.NDArray[np.bool_]

__all__ = ["Back", "Batch"]


class Batch(NamedTuple):
    """Pages [first, first + len(slots)) of a prompt that were read into host slots; `good`: which hold what they should."""

    first: int
    slots: Slots
    good: Flags


class Back:
    """Pages [first, end) of a prompt that have landed in `slots`, put together from batches that may land in any order.

    A page that could not be read ends the hit, if nothing behind it has landed yet; otherwise it is where reading ends
    (`torn`), and must be computed. Owned by the scheduler thread; the slots belong to whoever made it.
    """

    def __init__(self, end: int) -> None:
        """Make the empty back of a hit of `end` pages."""
        self.first = self.end = end
        self.slots: Slots = np.empty(0, np.int32)
        self.torn = False
        self._next = end  # a batch that ends here is the next one to be added
        self._early: dict[int, Batch] = {}  # by their ends

    def __len__(self) -> int:
        return len(self.slots)

    def __bool__(self) -> bool:
        return True

    def land(self, batch: Batch) -> Slots:
        """Take a batch in; returns slots that are not needed (by this one, or by others that waited for it)."""
        self._early[batch.first + len(batch.slots)] = batch
        gone = [np.empty(0, np.int32)]
        while (each := self._early.pop(self._next, None)) is not None:
            gone.append(self._add(each))
        return np.concatenate(gone)

    def take(self) -> Slots:
        """Give up the slots of the pages that have landed, in order."""
        slots, self.slots = self.slots, np.empty(0, np.int32)
        return slots

    def clear(self) -> Slots:
        """Give up all slots, also of batches that wait for others."""
        slots = np.concatenate([self.take(), *(batch.slots for batch in self._early.values())])
        self._early.clear()
        return slots

    def _add(self, batch: Batch) -> Slots:
        slots, bad = batch.slots, np.flatnonzero(~batch.good)
        self._next = batch.first
        if self.torn:
            return slots
        if not len(self.slots):
            count = int(bad[0]) if len(bad) else len(slots)
            self.slots, self.first, self.end = slots[:count], batch.first, batch.first + count
            return slots[count:]
        cut = int(bad[-1]) + 1 if len(bad) else 0
        self.torn = cut > 0
        self.slots = np.concatenate([slots[cut:], self.slots])
        self.first = batch.first + cut
        return slots[:cut]
