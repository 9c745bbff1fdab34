"""Copies between two pools in CPU memory, on worker threads: one thread a direction, completing like a GPU's copy streams."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from hicache.transfer.operation import CopyOp, Operation, OpKind, OpState
from hicache.transfer.priority import give_way
from hicache.transfer.streaming import LEAST_BYTES, load_streaming

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from hicache.pools import DevicePool, HostPool

    Ints = npt.NDArray[np.int32]

__all__ = ["ThreadCopier", "copy_pages", "runs"]

logger = logging.getLogger(__name__)

_stream = load_streaming()


def runs(src: Ints, dst: Ints) -> Iterable[tuple[int, int, int]]:
    """Coalesce page moves: (first src slot, first dst slot, count) for each stretch where both sides are neighbours."""
    begins = np.ones(len(src), np.bool_)
    begins[1:] = (np.diff(src) != 1) | (np.diff(dst) != 1)
    starts = np.flatnonzero(begins)
    counts = np.diff(starts, append=len(src))
    return zip(src[starts].tolist(), dst[starts].tolist(), counts.tolist(), strict=True)


def copy_pages(src_pool: npt.NDArray[np.uint8], src: Ints, dst_pool: npt.NDArray[np.uint8], dst: Ints) -> None:
    """Copy pages between two blobs of equal page size: many bytes past the caches, else neighbours in one memcpy."""
    if _stream is not None and len(src) * src_pool.shape[1] >= LEAST_BYTES:
        _stream(src_pool, src, dst_pool, dst)
        return
    for a, b, n in runs(src, dst):
        if n == 1:  # a row costs half of what a slice does: 5 % of the copy of a page of 64 KiB
            dst_pool[b] = src_pool[a]
        else:
            dst_pool[b : b + n] = src_pool[a : a + n]


class ThreadCopier:
    """A Copier over a CPU device pool. Errors end the operation as failed; the thread lives on."""

    def __init__(self, device: DevicePool, host: HostPool, completions: SimpleQueue[Operation]) -> None:
        self._device = device.data.numpy()
        self._host = host.data
        self._completions = completions
        self._queues: dict[OpKind, SimpleQueue[CopyOp | None]] = {OpKind.BACKUP: SimpleQueue(), OpKind.LOAD_BACK: SimpleQueue()}
        self._threads = [
            threading.Thread(target=self._work, args=(kind, queue), name=f"hicache-{kind}", daemon=True)
            for kind, queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, op: CopyOp) -> None:
        """Queue a copy on its direction's thread."""
        self._queues[op.kind].put(op)

    def close(self) -> None:
        """Let both threads finish their queues and end."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self, kind: OpKind, queue: SimpleQueue[CopyOp | None]) -> None:
        if kind is OpKind.BACKUP:
            give_way()
        while (op := queue.get()) is not None:
            try:
                if op.kind is OpKind.BACKUP:
                    copy_pages(self._device, op.src, self._host, op.dst)
                else:
                    copy_pages(self._host, op.src, self._device, op.dst)
                op.end(OpState.DONE)
            except Exception as error:
                logger.exception("%s of %d pages failed", op.kind, len(op.ids))
                op.fail(error)
            self._completions.put(op)
