"""Slab files: one file for each slot size, records at whole slots. Which slots are in use only the index knows.

A slot is the smallest run of blocks that holds its record. Any thread may read; whoever writes holds the index's write lock.
"""

from __future__ import annotations

import errno
import os
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from storage.location import punch_hole, sync_folder
from storage.record import BLOCK_BYTES, header_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["Gather", "SlabFiles", "gather", "slot_blocks"]

_MAX_BUFFERS = 1020  # of one call, three a record; IOV_MAX is 1024
_ZEROS = memoryview(bytes(BLOCK_BYTES))


class Gather(NamedTuple):
    """Neighbouring records on their way to their slots, in one call: at most IOV_MAX buffers, `nbytes` in all."""

    offset: int
    buffers: list[bytes | memoryview]
    nbytes: int


@lru_cache(1024)
def slot_blocks(key_bytes: int, token_bytes: int, payload_bytes: int) -> int:
    """Size of the slot for a record, in blocks."""
    return -(-(header_bytes(key_bytes, token_bytes) + payload_bytes) // BLOCK_BYTES)


def gather(blocks: int, slots: Sequence[int], headers: Sequence[bytes], payloads: Sequence[memoryview]) -> list[Gather]:
    """Prepare to write records of one size, neighbours together. The headers come without padding."""
    size = blocks * BLOCK_BYTES
    gathers: list[Gather] = []
    buffers: list[bytes | memoryview] = []
    first = following = nbytes = 0
    for slot, header, payload in zip(slots, headers, payloads, strict=True):
        if buffers and (slot != following or nbytes != (slot - first) * size or len(buffers) >= _MAX_BUFFERS):
            gathers.append(Gather(first * size, buffers, nbytes))
            buffers, nbytes = [], 0
        if not buffers:
            first = slot
        gap = -len(header) % BLOCK_BYTES
        buffers += (header, _ZEROS[:gap], payload)
        nbytes += len(header) + gap + payload.nbytes
        following = slot + 1
    if buffers:
        gathers.append(Gather(first * size, buffers, nbytes))
    return gathers


class SlabFiles:
    """The slab files of one folder, opened when first used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fds: dict[int, int] = {}
        self._unsynced: set[int] = set()
        self._lock = threading.Lock()

    def path(self, blocks: int) -> Path:
        """Path of the file whose slots have `blocks` blocks."""
        return self.folder / f"slab-{blocks:08d}.bin"

    def found(self) -> list[int]:
        """Slot sizes, in blocks, of the files that exist."""
        return sorted(int(path.stem[5:]) for path in self.folder.glob("slab-*.bin") if path.stem[5:].isdecimal())

    def fd(self, blocks: int) -> int:
        """File descriptor for slots of `blocks` blocks; the file is created if need be. Raises OSError."""
        fd = self._fds.get(blocks)
        if fd is None:
            with self._lock:
                fd = self._fds.get(blocks)
                if fd is None:
                    fd = os.open(self.path(blocks), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    sync_folder(self.folder)
                    self._fds[blocks] = fd
        return fd

    def write(self, blocks: int, gathers: Sequence[Gather]) -> None:
        """Write records; hardly needs the GIL. Raises OSError; a short write is ENOSPC."""
        fd = self.fd(blocks)
        for offset, buffers, nbytes in gathers:
            wrote = os.pwritev(fd, buffers, offset)
            if wrote != nbytes:
                raise OSError(errno.ENOSPC, f"wrote {wrote} of {nbytes} bytes")
        self._unsynced.add(blocks)  # after the bytes: a sync between would otherwise miss them

    def read(self, blocks: int, slot: int, buffers: Sequence[bytearray | memoryview]) -> int:
        """Read from a slot's beginning into buffers; returns the bytes read. Releases the GIL. Raises OSError."""
        return os.preadv(self.fd(blocks), buffers, slot * blocks * BLOCK_BYTES)

    def disk_bytes(self, sizes: Iterable[int]) -> int:
        """Bytes on disk of the files for some slot sizes, as the file system counts them."""
        return sum(os.fstat(self.fd(blocks)).st_blocks * 512 for blocks in sizes)

    def reserve(self, blocks: int, slot: int, count: int) -> None:
        """Have blocks allocated for slots that have none; many at once cost a third less than one by one. Raises OSError."""
        size = blocks * BLOCK_BYTES
        os.posix_fallocate(self.fd(blocks), slot * size, count * size)

    def wipe(self, blocks: int, slot: int) -> None:
        """Give a slot's blocks back to the file system."""
        punch_hole(self.fd(blocks), slot * blocks * BLOCK_BYTES, blocks * BLOCK_BYTES)

    def trim(self, blocks: int, slots: int) -> None:
        """Cut off what lies beyond `slots` slots: what a writer that died or ran out of space had begun."""
        fd, size = self.fd(blocks), slots * blocks * BLOCK_BYTES
        if os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)

    def sync(self) -> None:
        """Make all that this process wrote durable. Releases the GIL. Raises OSError."""
        while self._unsynced:
            os.fdatasync(self.fd(self._unsynced.pop()))

    def close(self) -> None:
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()
