"""Transfers that do nothing until told to, so that a test chooses the order in which operations end, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.transfer.copier import copy_pages
from hicache.transfer.operation import CopyOp, Operation, OpKind, OpState, PrefetchOp
from hicache.transfer.store_worker import StoreAccess

if TYPE_CHECKING:
    from collections.abc import Callable
    from queue import SimpleQueue

    from hicache.pools import DevicePool, HostPool
    from storage.base import PageStore

__all__ = ["GARBAGE", "ManualCopier", "ManualStoreWorker"]

GARBAGE = 0xEE
"""What a transfer that failed leaves in its destination."""


class ManualCopier:
    """Keeps submitted copies in `pending` until `complete` or `fail` is called with one of them."""

    def __init__(self, device: DevicePool, host: HostPool, completions: SimpleQueue[Operation]) -> None:
        self._device = device.data.numpy()
        self._host = host.data
        self._completions = completions
        self.pending: list[CopyOp] = []

    def submit(self, op: CopyOp) -> None:
        """Remember the copy."""
        self.pending.append(op)

    def issue(self, op: CopyOp) -> None:
        """Give a load-back that is pending its gate. Its bytes are moved by the first who passes that, or when it completes."""
        assert op.kind is OpKind.LOAD_BACK
        op.gate = _ManualGate(lambda: self._move(op))

    def complete(self, op: CopyOp) -> None:
        """Move the bytes now and post the operation as done."""
        self.pending.remove(op)
        self._move(op)
        op.end(OpState.DONE)
        self._completions.put(op)

    def _move(self, op: CopyOp) -> None:
        if op.kind is OpKind.BACKUP:
            copy_pages(self._device, op.src, self._host, op.dst)
        else:
            copy_pages(self._host, op.src, self._device, op.dst)

    def fail(self, op: CopyOp) -> None:
        """Post the operation as failed, its destination full of garbage."""
        self.pending.remove(op)
        target = self._host if op.kind is OpKind.BACKUP else self._device
        target[op.dst] = GARBAGE
        op.fail(OSError("copy failed on purpose"))
        self._completions.put(op)

    def close(self) -> None:
        """Complete what is left."""
        for op in list(self.pending):
            self.complete(op)


class _ManualGate:
    """A LayerGate that moves all layers when it is passed."""

    def __init__(self, move: Callable[[], None]) -> None:
        self._move = move

    def wait(self, layer: int) -> None:
        """Have the bytes there."""
        self._move()


class ManualStoreWorker:
    """Keeps submitted store accesses in `pending` until `complete` or `fail` is called with one of them."""

    def __init__(self, store: PageStore, host: HostPool, completions: SimpleQueue[Operation]) -> None:
        self._access = StoreAccess(store, host)
        self._host = host.data
        self._completions = completions
        self.pending: list[Operation] = []

    def submit(self, op: Operation) -> None:
        """Remember the access."""
        self.pending.append(op)

    def complete(self, op: Operation) -> None:
        """Access the store now and post the operation as it ended (cancelled, if its owner asked for that)."""
        self.pending.remove(op)
        self._access.run(op)
        self._completions.put(op)

    def fail(self, op: Operation) -> None:
        """Post the operation as failed; a read leaves garbage in its slots."""
        self.pending.remove(op)
        if isinstance(op, PrefetchOp):
            self._host[op.slots] = GARBAGE
        op.fail(OSError("store failed on purpose"))
        self._completions.put(op)

    def close(self) -> bool:
        """Complete what is left."""
        for op in list(self.pending):
            self.complete(op)
        return True
