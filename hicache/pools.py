"""The memory of the two upper tiers, and who owns which slot of it."""

from __future__ import annotations

import logging
import weakref
from array import array
from math import gcd
from mmap import PAGESIZE
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache.errors import ConfigError
from hicache.host_memory import map_memory, prefer_node, touch
from hicache.pinning import CudaRegistrar, node_of, pin, unpin

if TYPE_CHECKING:
    from mmap import mmap

    import numpy.typing as npt

    Slots = npt.NDArray[np.int32]

__all__ = ["DevicePool", "HostPool", "SlotPool"]

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30
"""Bytes page-locked at once."""


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
    """Page blobs in host memory: `data` is uint8 (num_pages, page_bytes), one mapping in huge pages where there are any.

    All of it is taken at once, so that no copy pays for that and no server runs out of it later. For a GPU it lies on that
    GPU's NUMA node and is page-locked, in chunks of `chunk_pages` each: no copy of a GPU may cross from one chunk into the
    next. If the system refuses, it stays pageable (`pinned` is False) and copies are slower.
    Store workers read and write single pages through `page`; which slots they may touch is settled by the operation they run.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device | str = "cpu") -> None:
        """Take the memory for copies to and from `device`. Raises ConfigError."""
        try:
            memory = map_memory(num_pages * page_bytes)
        except MemoryError as error:
            raise ConfigError(
                f"no memory for a host pool of {num_pages} pages ({num_pages * page_bytes / 2**30:.2f} GiB); "
                "lower --hicache-ratio or --hicache-size"
            ) from error
        self.data: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, num_pages * page_bytes).reshape(-1, page_bytes)
        self.chunk_pages = _chunk_pages(page_bytes)
        self.pinned = False
        if (gpu := torch.device(device)).type == "cuda":
            self._pin(memory, gpu)
        else:
            touch(memory)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes."""
        return self.data.nbytes if self.pinned else 0

    def page(self, slot: int) -> memoryview:
        """A writable view of one page."""
        return memoryview(self.data[slot])

    def _pin(self, memory: mmap, gpu: torch.device) -> None:
        size_gib = self.data.nbytes / 2**30
        try:
            registrar = CudaRegistrar()
            if (node := node_of(gpu)) is not None:
                prefer_node(memory, node)
            logger.info("page-locking a host pool of %.1f GiB", size_gib)
            touch(memory)
            chunks = pin(memory, self.chunk_pages * self.data.shape[1], registrar)
        except OSError as error:
            logger.warning("a host pool of %.1f GiB stays pageable, so copies are slower: %s", size_gib, error)
        else:
            self.pinned = True
            weakref.finalize(self, _release, memory, chunks, registrar)


def _release(memory: mmap, chunks: list[int], registrar: CudaRegistrar) -> None:
    """Give page locks up; that `memory` is named here keeps it mapped until then."""
    unpin(chunks, registrar)


def _chunk_pages(page_bytes: int) -> int:
    """Pages in a chunk of about CHUNK_BYTES that ends where a page of the machine does."""
    least = PAGESIZE // gcd(page_bytes, PAGESIZE)
    return least * max(1, CHUNK_BYTES // (least * page_bytes))


class DevicePool:
    """Page blobs in device memory: `data` is a torch.uint8 tensor (num_pages, page_bytes), on a CPU in huge pages."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device | str = "cpu") -> None:
        try:
            self.data = self._take(num_pages, page_bytes, torch.device(device))
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"no memory for a device pool of {num_pages} pages ({num_pages * page_bytes / 2**30:.2f} GiB) on {device}; "
                "lower --max-total-tokens"
            ) from error

    @staticmethod
    def _take(num_pages: int, page_bytes: int, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
        memory = map_memory(num_pages * page_bytes)
        touch(memory)  # all of it is there, or the server does not start
        return torch.from_numpy(np.frombuffer(memory, np.uint8, num_pages * page_bytes).reshape(-1, page_bytes))
