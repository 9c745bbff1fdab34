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

__all__ = ["SlabFiles", "SlotWrite", "slot_blocks"]

_MAX_BUFFERS = 1020  # of one call, three a record; IOV_MAX is 1024
_ZEROS = memoryview(bytes(BLOCK_BYTES))


class SlotWrite(NamedTuple):
    """A record on its way to a slot: its header without padding, and its payload."""

    slot: int
    sealed: bytes
    payload: memoryview


@lru_cache(1024)
def slot_blocks(key_bytes: int, token_bytes: int, payload_bytes: int) -> int:
    """Size of the slot for a record, in blocks."""
    return -(-(header_bytes(key_bytes, token_bytes) + payload_bytes) // BLOCK_BYTES)


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

    def write(self, blocks: int, writes: Sequence[SlotWrite]) -> None:
        """Write records, neighbours in one call. Raises OSError; a short write is ENOSPC."""
        fd, size = self.fd(blocks), blocks * BLOCK_BYTES
        buffers: list[bytes | memoryview] = []
        first = following = wanted = 0
        for slot, sealed, payload in writes:
            if buffers and (slot != following or wanted != (slot - first) * size or len(buffers) >= _MAX_BUFFERS):
                _write_all(fd, buffers, first * size, wanted)
                buffers, wanted = [], 0
            if not buffers:
                first = slot
            gap = -len(sealed) % BLOCK_BYTES
            buffers += (sealed, _ZEROS[:gap], payload)
            wanted += len(sealed) + gap + payload.nbytes
            following = slot + 1
        if buffers:
            _write_all(fd, buffers, first * size, wanted)
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


def _write_all(fd: int, buffers: Sequence[bytes | memoryview], offset: int, wanted: int) -> None:
    wrote = os.pwritev(fd, buffers, offset)
    if wrote != wanted:
        raise OSError(errno.ENOSPC, f"wrote {wrote} of {wanted} bytes")
