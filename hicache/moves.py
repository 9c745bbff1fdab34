"""Operations of the cache: how each begins, and what happens to the pages when it has ended.

Slots are taken by the caller (`hicache.reclaim` makes room); from then on the operation owns them until it has ended.
"""

from __future__ import annotations

import contextlib
from collections import deque
from queue import Empty
from typing import TYPE_CHECKING

from hicache.page_table import REFUSED, STORED
from hicache.transfer.operation import CopyOp, Operation, OpKind, OpState, PrefetchOp, ProbeOp, StoreOp
from hicache.transfer.store_worker import store_calls
from storage.base import GetOutcome, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from hicache.radix_tree import Node
    from hicache.tiers import Tiers
    from storage.base import PageRef

    Ids = npt.NDArray[np.int32]

__all__ = ["Mover"]


class Mover:
    """Starts operations and settles them. Owned by the scheduler thread; `drain` runs there."""

    def __init__(self, tiers: Tiers) -> None:
        self._t = tiers
        self._ended: deque[Operation] = deque()  # taken from the queue by `wait`
        self._last_read_s = self._last_load_s = 0.0  # when the last one ended: before, the store or the copier was busy

    def drain(self) -> int:
        """Settle every operation that has ended; returns how many."""
        t, count = self._t, 0
        while self._ended or not t.completions.empty():
            op = self._ended.popleft() if self._ended else t.completions.get()
            t.in_flight -= 1
            t.copying -= isinstance(op, CopyOp)
            op.on_end(op)
            count += 1
        return count

    def wait(self, timeout_s: float) -> None:
        """Block until an operation has ended that `drain` has not settled, or the time is up."""
        if not self._ended:
            with contextlib.suppress(Empty):
                self._ended.append(self._t.completions.get(timeout=timeout_s))

    # ---- device → host → disk

    def back_up(self, node: Node, first: int, ids: Ids, slots: Ids) -> None:
        """Copy device pages of `node`, the first of them at index `first`, into host slots; both copies stay."""
        self._copy_down(node, first, ids, slots, lambda op: None)

    def demote(self, node: Node, ids: Ids, slots: Ids) -> None:
        """Copy the last device pages of `node` into host slots, and give up their device copies once that has landed.

        They go at that moment, so that nothing can take their new host copies first. Pages that came into use meanwhile stay.
        """
        t = self._t

        def landed(op: Operation) -> None:
            t.coming_device -= len(ids)
            if op.state is OpState.DONE:
                self._leave_device(node, set(ids.tolist()))

        t.coming_device += len(ids)
        self._copy_down(node, node.device_len - len(ids), ids, slots, landed)

    def _copy_down(self, node: Node, first: int, ids: Ids, slots: Ids, landed: Callable[[Operation], None]) -> None:
        t = self._t
        assert t.copier is not None
        at_once = t.worker is not None and t.rules.stores_at_once
        admitted = int((t.table.hits.take(ids) >= t.rules.store_hits).sum()) if at_once else 0  # the front: see `hits`
        refs = t.refs(node, first, admitted) if admitted else []

        def ended(op: Operation) -> None:
            self._backed_up(ids, slots, refs, op)
            landed(op)

        t.table.hold_device(ids)
        t.in_flight += 1
        t.copying += 1
        src = t.table.device_slots.take(ids)
        t.copier.submit(CopyOp(kind=OpKind.BACKUP, on_end=ended, ids=ids, src=src, dst=slots))

    def _leave_device(self, node: Node, ids: set[int]) -> None:
        """Drop the device copies of `ids` from the end of `node` up (a split may have moved some into its new upper half)."""
        t = self._t
        while node.parent is not None and not node.users and not node.device_children:
            count = 0
            while count < node.device_len and node.pages[node.device_len - 1 - count] in ids:
                count += 1
            if count == 0:
                return
            t.demote(node, count)
            t.metrics.evicted_pages.labels("device").inc(count)
            if node.device_len:
                return
            node = node.parent

    def _backed_up(self, ids: Ids, slots: Ids, refs: list[PageRef], op: Operation) -> None:
        t = self._t
        t.table.let_go_device(ids)
        done = op.state is OpState.DONE
        t.backups_fail = not done
        t.metrics.count_operation(op, len(ids) if done else 0, t.geometry.page_bytes)
        if not done:
            t.host.give(slots)
            t.metrics.dropped_pages.labels("backup_failed").inc(len(ids))
            return
        t.land_on_host(ids, slots)
        if refs and t.worker is not None and not t.store_stalls:  # what waits for a store holds host slots
            self._store(ids[: len(refs)], refs)

    def store(self, node: Node, first: int, ids: Ids) -> None:
        """Write host pages of `node`, the first of them at index `first`, to the store, so that they can leave the host."""
        self._store(ids, self._t.refs(node, first, len(ids)), len(ids))

    def _store(self, ids: Ids, refs: list[PageRef], coming: int = 0) -> None:
        t = self._t
        assert t.worker is not None

        def ended(op: Operation) -> None:
            assert isinstance(op, StoreOp)
            t.coming_host -= coming
            del t.storing[op]
            self._stored(ids, op)

        t.table.hold_host(ids)
        t.in_flight += 1
        t.coming_host += coming
        slots = t.table.host_slots.take(ids)
        store_op = StoreOp(
            kind=OpKind.STORE, on_end=ended, ids=ids, slots=slots, refs=refs, namespace=t.namespaces[refs[0].namespace].info
        )
        t.storing[store_op] = None
        t.worker.submit(store_op)

    def _stored(self, ids: Ids, op: StoreOp) -> None:
        t = self._t
        t.table.let_go_host(ids)
        kept = 0
        for i, outcome in zip(ids.tolist(), op.outcomes, strict=False):
            if outcome in (PutOutcome.STORED, PutOutcome.PRESENT):
                t.table.store[i] = STORED
                kept += 1
            else:
                t.table.store[i] = REFUSED
                t.metrics.store_errors.labels(f"put_{outcome.value}").inc()
        if op.state is OpState.FAILED:
            t.table.stored[ids] = REFUSED
            t.metrics.store_errors.labels(op.error_kind).inc()
        if kept < len(ids):
            t.metrics.dropped_pages.labels("not_stored").inc(len(ids) - kept)
        t.metrics.count_operation(op, kept, t.geometry.page_bytes)
        t.forget_orphans(ids)

    # ---- host → device

    def load_back(self, node: Node, ids: Ids, slots: Ids, ended: Callable[[CopyOp], None]) -> CopyOp:
        """Copy host pages into device slots: `ids` end with `node`, and what is before them is on the device.

        The operation holds a pin of its own. `ended` runs once tree and table know of it (or the slots are free again).
        """
        t = self._t
        assert t.copier is not None

        def settle(op: Operation) -> None:
            assert isinstance(op, CopyOp)
            self._loaded(op)
            t.promote_path(node)
            t.tree.unpin(node)
            ended(op)

        op = CopyOp(kind=OpKind.LOAD_BACK, on_end=settle, ids=ids, src=t.table.host_slots.take(ids), dst=slots)
        t.tree.pin(node)
        t.table.hold_host(ids)
        t.table.loading[ids] = 1
        t.in_flight += 1
        t.copying += 1
        t.copier.submit(op)
        return op

    def _loaded(self, op: CopyOp) -> None:
        t = self._t
        t.table.let_go_host(op.ids)
        t.table.loading[op.ids] = 0
        done = op.state is OpState.DONE
        t.metrics.count_operation(op, len(op.ids) if done else 0, t.geometry.page_bytes)
        if done:
            begun_s = max(op.started_s, self._last_load_s)
            t.planner.observe_load(len(op.ids), op.ended_s - begun_s)
            t.land_on_device(op.ids, op.dst)
        else:
            t.device.give(op.dst)
        self._last_load_s = op.ended_s

    # ---- disk → host

    def probe(self, keys: Sequence[bytes], ended: Callable[[ProbeOp], None]) -> ProbeOp:
        """Ask the store how many of `keys` it has."""
        t = self._t
        assert t.worker is not None

        def settle(op: Operation) -> None:
            assert isinstance(op, ProbeOp)
            if op.state is OpState.FAILED:
                t.metrics.store_errors.labels(op.error_kind).inc()
            t.metrics.count_operation(op, 0, 0)
            ended(op)

        op = ProbeOp(kind=OpKind.PROBE, on_end=settle, keys=keys)
        t.in_flight += 1
        t.worker.submit(op)
        return op

    def prefetch(self, refs: Sequence[PageRef], slots: Ids, ended: Callable[[PrefetchOp, int], None]) -> PrefetchOp:
        """Read pages from the store into host slots; `ended` gets the number of leading pages that are good.

        The slots stay the caller's: it keeps or frees them in `ended`.
        """
        t = self._t
        assert t.worker is not None

        def settle(op: Operation) -> None:
            assert isinstance(op, PrefetchOp)
            good = self._read(op)
            if good:
                begun_s = max(op.started_s, self._last_read_s)
                t.planner.observe_read(store_calls(good), good, op.ended_s - begun_s)
            self._last_read_s = op.ended_s
            t.metrics.count_operation(op, good, t.geometry.page_bytes)
            ended(op, good)

        op = PrefetchOp(kind=OpKind.PREFETCH, on_end=settle, slots=slots, refs=refs)
        t.in_flight += 1
        t.worker.submit(op)
        return op

    def _read(self, op: PrefetchOp) -> int:
        errors = self._t.metrics.store_errors
        if op.state is OpState.FAILED:
            errors.labels(op.error_kind).inc()
        good = 0
        while good < len(op.outcomes) and op.outcomes[good] is GetOutcome.HIT:
            good += 1
        for outcome in op.outcomes:
            if outcome in (GetOutcome.CORRUPT, GetOutcome.MISMATCH, GetOutcome.FAILED):
                errors.labels(f"get_{outcome.value}").inc()
        return good
