"""Copies between device memory and host memory on streams of their own, one a direction, ordered against compute by events.

Every copy waits for what compute had submitted when the copy was. Compute waits for a load-back either as a whole, since its
operation ends only when the bytes have landed, or layer by layer through the operation's gate. Nothing waits for the device
as a whole: ends are found by asking events.

Streams and events come from the module that torch has for the pool's device. On a CPU torch's do their work at once, which is
how this file runs, and is tested, without a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hicache.transfer.io_backend import Move, split_layers
from hicache.transfer.operation import CopyOp, OpKind, OpState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.pools import DevicePool, HostPool
    from hicache.transfer.io_backend import IoBackend, Part
    from hicache.transfer.operation import Operation

__all__ = ["CudaCopier", "StreamGate"]

logger = logging.getLogger(__name__)

POLL_S = 0.0002
"""How often the oldest copy under way is asked whether it has ended."""
LEAST_PART_BYTES = 2 << 20
"""A part of a load-back that compute can wait for by itself; smaller ones cost more launches than they save."""


class CudaCopier:
    """A Copier over a device pool and a host pool, page-locked or not. Errors end the operation as failed; the lanes live on.

    backends: how each direction copies, its own instance each. bounds: where layers begin and end in a page, in bytes.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        completions: SimpleQueue[Operation],
        *,
        backends: dict[OpKind, IoBackend],
        bounds: Sequence[int],
    ) -> None:
        self._pools = (device, host)  # the host pool gives up its page locks when nobody holds it
        down, up = backends[OpKind.BACKUP], backends[OpKind.LOAD_BACK]
        host_data = torch.from_numpy(host.data)
        page = (0, device.data.shape[1])
        self._lanes = {
            OpKind.BACKUP: _Lane(OpKind.BACKUP, device.data, host_data, down, page, completions),
            OpKind.LOAD_BACK: _Lane(OpKind.LOAD_BACK, host_data, device.data, up, bounds, completions),
        }

    def submit(self, op: CopyOp) -> None:
        """Hand a copy to its direction's lane. The caller's current stream is taken for the compute's."""
        self._lanes[op.kind].submit(op)

    def close(self) -> None:
        """Let both lanes end what they have."""
        for lane in self._lanes.values():
            lane.close()


class StreamGate:
    """The LayerGate of one load-back: an event after each part of it. `module`: torch's for `device`."""

    def __init__(self, module: Any, device: torch.device, landed: list[tuple[Part, Any]]) -> None:
        self._module = module
        self._device = device
        self._landed = landed

    def wait(self, layer: int) -> None:
        """Let the current stream wait for the part that has this layer."""
        for part, event in self._landed:
            if layer < part.end:
                self._module.current_stream(self._device).wait_event(event)
                return
        raise AssertionError(f"layer {layer} of {self._landed[-1][0].end}")


class _Issued(NamedTuple):
    """A copy that the stream has; `end` follows the last of its commands. error: what stopped it from being issued whole."""

    op: CopyOp
    end: Any
    error: Exception | None


class _Lane:
    """One direction: a stream, and a thread that feeds it and asks it what has ended. Copies end in the order submitted."""

    def __init__(
        self,
        kind: OpKind,
        src: torch.Tensor,
        dst: torch.Tensor,
        backend: IoBackend,
        bounds: Sequence[int],
        completions: SimpleQueue[Operation],
    ) -> None:
        self._src, self._dst = src, dst
        self._backend = backend
        self._bounds = bounds
        self._completions = completions
        self._device = (dst if kind is OpKind.LOAD_BACK else src).device
        self._module: Any = torch.get_device_module(self._device)
        self._stream = self._module.Stream(self._device)
        self._queue: SimpleQueue[tuple[CopyOp, Any] | None] = SimpleQueue()
        self._issued: deque[_Issued] = deque()
        self._thread = threading.Thread(target=self._work, name=f"hicache-{kind}", daemon=True)
        self._thread.start()

    def submit(self, op: CopyOp) -> None:
        """Queue a copy behind what the caller's stream has been given so far."""
        ready = self._module.Event()
        ready.record(self._module.current_stream(self._device))
        self._queue.put((op, ready))

    def close(self) -> None:
        """Let the thread end what was submitted. Idempotent."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        self._module.set_device(self._device)
        closing = False
        with self._module.stream(self._stream):
            while self._issued or not closing:
                with contextlib.suppress(Empty):
                    item = self._queue.get(timeout=POLL_S if self._issued else None)
                    closing = item is None
                    if item is not None:
                        self._issue(*item)
                self._settle()

    def _issue(self, op: CopyOp, ready: Any) -> None:
        """Give a copy to the stream. If that fails, what was given of it still has to end before its slots are anybody's."""
        error: Exception | None = None
        landed: list[tuple[Part, Any]] = []
        end = self._module.Event()
        try:
            self._stream.wait_event(ready)
            landed = self._copy(op)
        except Exception as failure:
            logger.exception("%s of %d pages failed", op.kind, len(op.ids))
            error = failure
        try:
            end.record(self._stream)
        except RuntimeError as failure:  # an event that was never recorded has ended
            error = error or failure
        if error is None and op.kind is OpKind.LOAD_BACK:
            op.gate = StreamGate(self._module, self._device, landed)
        self._issued.append(_Issued(op, end, error))

    def _copy(self, op: CopyOp) -> list[tuple[Part, Any]]:
        move = Move(self._src, op.src, self._dst, op.dst)
        move.check()
        landed = []
        for part in self._backend.copy(move, split_layers(self._bounds, len(op.src), LEAST_PART_BYTES)):
            event = self._module.Event()
            event.record(self._stream)
            landed.append((part, event))
        return landed

    def _settle(self) -> None:
        """Post what has ended, oldest first."""
        while self._issued:
            op, end, error = self._issued[0]
            try:
                if not end.query():
                    return
            except RuntimeError as failure:  # the device is in an error state: nothing runs on it any more
                error = failure
            self._issued.popleft()
            if error is None:
                op.end(OpState.DONE)
            else:
                op.fail(error)
            self._completions.put(op)
