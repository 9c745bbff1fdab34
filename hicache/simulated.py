"""Transfers and a page store that move no bytes: what they would have done is done at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.eviction import EvictionOrder, Usage
from hicache.transfer.operation import OpState
from hicache.transfer.store_worker import StoreAccess
from storage.base import GetOutcome, PutOutcome, StoreStats

if TYPE_CHECKING:
    from collections.abc import Sequence
    from queue import SimpleQueue

    from hicache.pools import HostPool
    from hicache.transfer.operation import CopyOp, Operation
    from storage.base import NamespaceInfo, PageRecord, PageRef, PageStore

__all__ = ["InstantCopier", "InstantStoreRunner", "KeyStore"]


class InstantCopier:
    """Ends every copy as it is submitted, and copies nothing."""

    def __init__(self, completions: SimpleQueue[Operation]) -> None:
        self._completions = completions

    def submit(self, op: CopyOp) -> None:
        """Post the copy as done."""
        op.end(OpState.DONE)
        self._completions.put(op)

    def close(self) -> None:
        """Nothing is left to do."""


class InstantStoreRunner:
    """Runs every store access as it is submitted, on the caller's thread."""

    def __init__(self, store: PageStore, host: HostPool, completions: SimpleQueue[Operation]) -> None:
        self._access = StoreAccess(store, host)
        self._completions = completions

    def submit(self, op: Operation) -> None:
        """Access the store and post the operation as it ended."""
        self._access.run(op)
        self._completions.put(op)

    def close(self) -> bool:
        """Nothing is left to do."""
        return True


class _Record:
    """A page that is stored: its parent, if that is stored too, and how many children are."""

    __slots__ = ("children", "key", "parent", "usage")

    def __init__(self, key: bytes, parent: _Record | None) -> None:
        self.key = key
        self.parent = parent
        self.children = 0
        self.usage = Usage()


class KeyStore:
    """A page store of `capacity` pages that keeps keys only; least recently used leaves go first. Owned by one thread."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.written = 0
        self.evicted = 0
        self.secret = b""
        self._records: dict[bytes, _Record] = {}
        self._order: EvictionOrder[_Record] = EvictionOrder("lru")
        self._tick = 0

    def register_namespace(self, info: NamespaceInfo) -> None:
        """Any namespace will do."""

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """Count the leading keys that are stored."""
        for count, key in enumerate(keys):
            if key not in self._records:
                return count
        return len(keys)

    def put_many(self, records: Sequence[PageRecord]) -> list[PutOutcome]:
        """Store keys, parents first."""
        return [self._put(record.ref) for record in records]

    def get_many(self, refs: Sequence[PageRef], into: Sequence[memoryview]) -> list[GetOutcome]:
        """Say which pages are stored, and refresh them."""
        out = []
        for ref in refs:
            record = self._records.get(ref.key)
            if record is not None:
                self._use(record)
            out.append(GetOutcome.ABSENT if record is None else GetOutcome.HIT)
        return out

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete leaves among `keys`."""
        gone = [record for key in reversed(keys) if (record := self._records.get(key)) is not None and not record.children]
        for record in gone:
            self._remove(record)
        return len(gone)

    def clear(self, namespace: bytes | None = None) -> int:
        """Forget everything; namespaces are not told apart."""
        count = len(self._records)
        self._records.clear()
        self._order = EvictionOrder("lru")
        return count

    def sync(self) -> None:
        """Nothing is on a medium."""

    def stats(self) -> StoreStats:
        """Totals, in pages."""
        return StoreStats(len(self._records), 0, 0, self.evicted, (), {})

    def close(self) -> None:
        """Nothing is open."""

    def _put(self, ref: PageRef) -> PutOutcome:
        record = self._records.get(ref.key)
        if record is not None:
            self._use(record)
            return PutOutcome.PRESENT
        parent = self._records.get(ref.parent_key)
        if not self._room(parent):
            return PutOutcome.NO_ROOM
        self._records[ref.key] = record = _Record(ref.key, parent)
        if parent is not None:
            parent.children += 1
            self._order.discard(parent)
        self.written += 1
        self._use(record)
        return PutOutcome.STORED

    def _room(self, parent: _Record | None) -> bool:
        if len(self._records) < self.capacity:
            return True
        victim = self._order.pick(lambda record: record is not parent)
        if victim is None:
            return False
        self._remove(victim)
        self.evicted += 1
        return True

    def _use(self, record: _Record) -> None:
        self._tick += 1
        record.usage.tick = self._tick
        if not record.children:
            self._order.add(record, record.usage)

    def _remove(self, record: _Record) -> None:
        self._order.discard(record)
        del self._records[record.key]
        parent = record.parent
        if parent is not None:
            parent.children -= 1
            parent.usage.absorb(record.usage, recency=True)
            if not parent.children:
                self._order.add(parent, parent.usage)
