"""Where each logical page lives, what is in flight for it, and whether the disk has it: one row a page.

Rows are numbered by *logical page ids*, which the tree's nodes hold. Nodes own no tier state, so splitting one moves none.
Every column is an `array` for single look-ups with a numpy view over the same memory for whole runs of pages.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    Ids = npt.NDArray[np.int32]

__all__ = ["NOT_STORED", "NOWHERE", "REFUSED", "STORED", "PageTable"]

NOWHERE = -1
NOT_STORED, STORED, REFUSED = 0, 1, 2


class PageTable:
    """Rows for up to `capacity` logical pages: every page in memory has one, so device + host slots are enough.

    device_slot, host_slot: the page's slot in that tier, or NOWHERE. Set only once its bytes have landed there.
    device_busy, host_busy: operations in flight that read the page's copy in that tier; such a copy is never a victim.
    loading: 1 while a load-back of the page is in flight.
    stored: whether the disk store has acknowledged the page: NOT_STORED, STORED, or REFUSED when it would not take it.
    hits: how often requests used the page, its computation included (kept while it is in memory; longer by ghosts). Never more
    often than the page before it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.device_slot, self.device_slots = _column("i", capacity, np.int32, NOWHERE)
        self.host_slot, self.host_slots = _column("i", capacity, np.int32, NOWHERE)
        self.device_busy, self.device_busys = _column("h", capacity, np.int16, 0)
        self.host_busy, self.host_busys = _column("h", capacity, np.int16, 0)
        self.hit, self.hits = _column("i", capacity, np.int32, 0)
        self.load, self.loading = _column("b", capacity, np.int8, 0)
        self.store, self.stored = _column("b", capacity, np.int8, 0)
        self._free = array("i", range(capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        """Rows in use."""
        return self.capacity - len(self._free)

    def new(self, count: int) -> array[int]:
        """Hand out `count` fresh rows. Running out is a bug: rows are as many as slots."""
        free = self._free
        assert count <= len(free), "more logical pages than slots"
        at = len(free) - count
        ids = free[at:]
        del free[at:]
        ids.reverse()
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Take rows back; each must have no slot and nothing in flight."""
        for i in ids:
            assert self.device_slot[i] == NOWHERE, "a page with a device slot was forgotten"
            assert self.host_slot[i] == NOWHERE, "a page with a host slot was forgotten"
            assert not self.device_busy[i], "a page being backed up was forgotten"
            assert not self.host_busy[i], "a page being stored or loaded was forgotten"
            self.hit[i] = self.store[i] = self.load[i] = 0
            self._free.append(i)

    def hold_device(self, ids: Ids) -> None:
        """Mark an operation in flight that reads the device copy of each page."""
        self.device_busys[ids] = self.device_busys.take(ids) + 1

    def let_go_device(self, ids: Ids) -> None:
        """Undo one `hold_device`."""
        self.device_busys[ids] = self.device_busys.take(ids) - 1

    def hold_host(self, ids: Ids) -> None:
        """Mark an operation in flight that reads the host copy of each page."""
        self.host_busys[ids] = self.host_busys.take(ids) + 1

    def let_go_host(self, ids: Ids) -> None:
        """Undo one `hold_host`."""
        self.host_busys[ids] = self.host_busys.take(ids) - 1


def _column(code: str, capacity: int, dtype: npt.DTypeLike, fill: int) -> tuple[array[int], npt.NDArray[np.int32]]:
    data = array(code, [fill]) * capacity
    return data, np.frombuffer(data, dtype=dtype)
