"""Memory for pools: one mapping, in huge pages where the kernel has them, near a device where the machine has several nodes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["address_of", "map_memory", "prefer_node", "touch"]

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_TOUCH_BYTES = 256 << 20


def map_memory(num_bytes: int) -> mmap.mmap:
    """Map private, zeroed memory, which is taken from the machine when it is first written. Raises MemoryError."""
    try:
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping begins."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def prefer_node(memory: mmap.mmap, node: int) -> bool:
    """Ask for pages of this NUMA node, if it has any left, for what is written from now on; False if the kernel refuses."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < 64:
        return False
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(address_of(memory)), ctypes.c_ulong(len(memory))
    return int(libc.syscall(number, address, size, _MPOL_PREFERRED, ctypes.byref(mask), ctypes.c_ulong(65), 0)) == 0


def touch(memory: mmap.mmap) -> None:
    """Have all of a mapping from the machine now, by all cores at once: page faults are what pinning spends its time on."""
    data = np.frombuffer(memory, np.uint8)

    def fill(first: int) -> None:
        data[first : first + _TOUCH_BYTES] = 0

    if len(data) <= _TOUCH_BYTES:
        fill(0)
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(fill, range(0, len(data), _TOUCH_BYTES)))
