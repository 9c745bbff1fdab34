"""The memory of the two upper tiers, and who owns which slot of it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    Slots = npt.NDArray[np.int32]

__all__ = ["DevicePool", "HostPool", "SlotPool"]


class SlotPool:
    """Hands out slots of one pool and takes them back. Free + owned = capacity, always; a double free is a bug and asserts.

    Owned by the scheduler thread. Fresh pools hand out neighbouring slots in order, so that copies coalesce.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = array("i", range(capacity - 1, -1, -1))
        self._owned = np.zeros(capacity, np.bool_)

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """Slots that somebody owns."""
        return self.capacity - len(self._free)

    def take(self, count: int) -> Slots:
        """Own `count` slots; the caller has made sure that they are free. Returns an own array."""
        at = len(self._free) - count
        assert at >= 0, f"{count} slots asked, {len(self._free)} free"
        slots = np.array(self._free[at:], np.int32)[::-1].copy()
        del self._free[at:]
        self._owned[slots] = True
        return slots

    def give(self, slots: Slots) -> None:
        """Give owned slots back."""
        if not len(slots):
            return
        ids = slots.tolist()
        assert self._owned.take(slots).all(), "a slot was freed twice"
        assert len(set(ids)) == len(ids), "a slot was freed twice at once"
        self._owned[slots] = False
        ids.reverse()
        self._free.fromlist(ids)


class HostPool:
    """Page blobs in host memory: `data` is uint8 (num_pages, page_bytes).

    Store workers read and write single pages through `page`; which slots they may touch is settled by the operation they run.
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        try:
            self.data: npt.NDArray[np.uint8] = np.empty((num_pages, page_bytes), np.uint8)
        except MemoryError as error:
            raise ConfigError(
                f"no memory for a host pool of {num_pages} pages ({num_pages * page_bytes / 2**30:.2f} GiB); "
                "lower --hicache-ratio or --hicache-size"
            ) from error

    def page(self, slot: int) -> memoryview:
        """A writable view of one page."""
        return memoryview(self.data[slot])


class DevicePool:
    """Page blobs in device memory: `data` is a torch.uint8 tensor (num_pages, page_bytes)."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device | str = "cpu") -> None:
        try:
            self.data = torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"no memory for a device pool of {num_pages} pages ({num_pages * page_bytes / 2**30:.2f} GiB) on {device}; "
                "lower --max-total-tokens"
            ) from error
