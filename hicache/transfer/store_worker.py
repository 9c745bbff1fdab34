"""Runs store accesses off the scheduler thread: one thread writes, one reads, one answers probes."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from hicache.transfer.operation import Operation, OpState, PrefetchOp, ProbeOp, StoreOp
from hicache.transfer.priority import give_way
from storage.base import GetOutcome, PageRecord

if TYPE_CHECKING:
    from hicache.pools import HostPool
    from storage.base import PageStore

__all__ = ["PAGES_A_READ", "StoreAccess", "StoreWorker", "store_calls"]

logger = logging.getLogger(__name__)

PAGES_A_READ = 16
"""Pages asked of the store at once; a prefetch can be cancelled between two such reads."""

CLOSE_S = 10.0


def store_calls(pages: int) -> int:
    """How many calls of the store a prefetch of `pages` pages takes."""
    return -(-pages // PAGES_A_READ)


class StoreAccess:
    """Does what one operation asks of a PageStore, on the caller's thread. Operations of different types may run at once."""

    def __init__(self, store: PageStore, host: HostPool) -> None:
        self._store = store
        self._host = host
        self._registered: set[bytes] = set()  # touched by writes only

    def run(self, op: Operation) -> None:
        """Run an operation to its end: done, failed (whatever is raised) or, if that was asked for, cancelled."""
        if op.cancelled:
            op.end(OpState.CANCELLED)
            return
        try:
            if isinstance(op, StoreOp):
                self._write(op)
            elif isinstance(op, PrefetchOp):
                self._read(op)
            else:
                assert isinstance(op, ProbeOp), f"not an operation of a store: {op.kind}"
                op.found = self._store.count_prefix(op.keys)
        except Exception as error:
            logger.warning("%s failed: %s", op.kind, error)
            op.fail(error)
        else:
            op.end(OpState.DONE)

    def _write(self, op: StoreOp) -> None:
        if op.namespace.digest not in self._registered:
            self._store.register_namespace(op.namespace)
            self._registered.add(op.namespace.digest)
        records = [PageRecord(ref, self._host.page(slot)) for ref, slot in zip(op.refs, op.slots.tolist(), strict=True)]
        op.outcomes = self._store.put_many(records)

    def _read(self, op: PrefetchOp) -> None:
        slots = op.slots.tolist()
        for at in range(0, len(slots), PAGES_A_READ):
            if op.cancelled:
                return
            refs = op.refs[at : at + PAGES_A_READ]
            got = self._store.get_many(refs, [self._host.page(slot) for slot in slots[at : at + PAGES_A_READ]])
            op.outcomes += got
            if any(outcome is not GetOutcome.HIT for outcome in got):
                return


class StoreWorker:
    """Feeds one PageStore. Operations of a kind run in order; an exception ends the operation as failed and the thread lives.

    A read that hangs holds up later reads, never the scheduler: whoever waits has a deadline.
    """

    def __init__(self, store: PageStore, host: HostPool, completions: SimpleQueue[Operation]) -> None:
        self._access = StoreAccess(store, host)
        self._completions = completions
        self._queues: dict[type[Operation], SimpleQueue[Operation | None]] = {}
        self._threads: list[threading.Thread] = []
        for op_type in (StoreOp, PrefetchOp, ProbeOp):
            queue = self._queues[op_type] = SimpleQueue()
            thread = threading.Thread(
                target=self._work, args=(op_type, queue), name=f"hicache-{op_type.__name__.lower()}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def submit(self, op: Operation) -> None:
        """Queue an operation; returns at once. Owner thread."""
        self._queues[type(op)].put(op)

    def close(self) -> bool:
        """Let the threads finish their queues; False if one hangs past CLOSE_S. The store stays open."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, op_type: type[Operation], queue: SimpleQueue[Operation | None]) -> None:
        if op_type is StoreOp:
            give_way()
        while (op := queue.get()) is not None:
            self._access.run(op)
            self._completions.put(op)
