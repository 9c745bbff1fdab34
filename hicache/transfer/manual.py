"""A copier that does nothing until told to, so that a test chooses the order in which operations end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.transfer.copier import copy_pages
from hicache.transfer.operation import CopyOp, Operation, OpKind, OpState

if TYPE_CHECKING:
    from queue import SimpleQueue

    from hicache.pools import DevicePool, HostPool

__all__ = ["ManualCopier"]


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

    def complete(self, op: CopyOp) -> None:
        """Move the bytes now and post the operation as done."""
        self.pending.remove(op)
        if op.kind is OpKind.BACKUP:
            copy_pages(self._device, op.src, self._host, op.dst)
        else:
            copy_pages(self._host, op.src, self._device, op.dst)
        op.end(OpState.DONE)
        self._completions.put(op)

    def fail(self, op: CopyOp) -> None:
        """Post the operation as failed, its destination full of garbage."""
        self.pending.remove(op)
        target = self._host if op.kind is OpKind.BACKUP else self._device
        target[op.dst] = 0xEE
        op.fail(OSError("copy failed on purpose"))
        self._completions.put(op)

    def close(self) -> None:
        """Complete what is left."""
        for op in list(self.pending):
            self.complete(op)
