"""How records get into the LMDB store: make room, write slots, then enter them into the index, all under the write lock.

A slot freed by eviction is used again only in a later transaction. So what a dead writer overwrote was free in the last
committed index, and what a racing reader finds in the slot belongs to an entry that has changed by then.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import lmdb
import msgspec

from storage.base import PutOutcome
from storage.helper import Helper
from storage.lmdb_index import Entry, SlabCount
from storage.lmdb_writer import IndexWriter
from storage.record import BLOCK_BYTES, frame, seal
from storage.slab import gather

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from storage.base import PageRef
    from storage.lmdb_index import Index, Space
    from storage.slab import Gather, SlabFiles

__all__ = ["Limits", "PagePutter", "Pending"]

_ROUNDS = 32  # evictions and retries for one chunk, against a busy neighbour process
_INDEX_BYTES_A_PAGE = 320  # measured at most: entry, leaf, free slot, page fill of 2/3, copies of open transactions
_MARGIN_BYTES = 64 << 10  # what files besides the slabs may grow by until they are looked at again
_SLACK = 2  # chunks' worth evicted beyond need
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds the store back. quotas: bytes of slots by tenant. free_floor_bytes: left to others on the file system."""

    capacity_bytes: int
    free_floor_bytes: int
    quotas: Mapping[str, int] = field(default_factory=dict)


class Pending(msgspec.Struct, frozen=True, gc=False):
    """A record ready to be written. at: its place in the caller's batch."""

    at: int
    ref: PageRef
    space: Space
    blocks: int
    payload: memoryview


class _Growing(NamedTuple):
    """Slots of one size that get blocks: those from `end` on, and `holes`."""

    blocks: int
    end: int
    holes: tuple[int, ...]


class _Part(NamedTuple):
    """Records of one size and their slots, to be written in one go."""

    blocks: int
    slots: Sequence[int]
    records: Sequence[Pending]


class _Room(NamedTuple):
    """What may be in use after the transaction: bytes of slots, of blocks on disk, and pages the index can hold."""

    live_bytes: int
    disk_bytes: int
    pages: int


class PagePutter:
    """Writes chunks of records. Any thread of one process at a time: the caller holds a lock."""

    def __init__(
        self,
        index: Index,
        slabs: SlabFiles,
        limits: Limits,
        clock: Callable[[], int],
        count_error: Callable[[str], None],
        durable: bool,
    ) -> None:
        self._index = index
        self._slabs = slabs
        self._limits = limits
        self._clock = clock
        self._count_error = count_error
        self._durable = durable
        self._helper = Helper("store-write")
        self._max_pages = index.env.info()["map_size"] // _INDEX_BYTES_A_PAGE
        self.overhead_bytes = 0
        self.evicted_pages = 0

    def put(
        self, pending: Sequence[Pending], held: Callable[[], Collection[bytes]], touches: Mapping[bytes, int]
    ) -> dict[int, PutOutcome]:
        """Write records of one tenant, as many of them as there is room for, in order.

        Returns STORED or PRESENT by `Pending.at`; for what is left out there is no room. `touches` (last uses by key) are
        entered first. `held()`: keys that must not be evicted for them. Raises OSError and lmdb.Error.
        """
        todo, no_growth = list(pending), False
        for _ in range(_ROUNDS):
            if not todo or self._spare_bytes() < 0:
                break
            try:
                todo, outcomes = self._round(todo, held, touches, no_growth)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._count_error("enospc")
                todo, no_growth = (todo[: len(todo) // 2] if no_growth else todo), True
            except lmdb.MapFullError:
                self._count_error("map_full")
                todo = todo[: len(todo) // 2]
            else:
                if outcomes:
                    return outcomes
        return {}

    def close(self) -> None:
        """End the helper thread."""
        self._helper.close()

    def give_back_free_blocks(self) -> None:
        """Punch out every free slot that still has blocks."""
        with self._index.env.begin(write=True) as txn:
            writer = IndexWriter(self._index, txn)
            self._drain(writer, {}, writer.disk_bytes)
            writer.flush()

    def cut_tails(self) -> None:
        """Shorten slab files that end in holes, and punch the others again: a writer that died may have filled some."""
        with self._index.env.begin(write=True) as txn:
            writer = IndexWriter(self._index, txn)
            for blocks, hole, slot in self._index.free_slots(txn):
                if hole:
                    self._slabs.wipe(blocks, slot)
            for blocks in list(writer.slabs):
                self._slabs.trim(blocks, writer.cut_tail(blocks))
            writer.flush()

    def tidy(self, *, was_clean: bool) -> None:
        """Give back what a writer that died left beyond the index's knowledge. For the only process at the store."""
        with self._index.env.begin(write=True) as txn:
            counts = self._index.slab_counts(txn)
            for blocks in self._slabs.found():
                self._slabs.trim(blocks, counts.get(blocks, SlabCount()).slots)
            for blocks, hole, slot in () if was_clean else self._index.free_slots(txn):
                if hole:
                    self._slabs.wipe(blocks, slot)

    def shrink(self) -> None:
        """Evict and give blocks back until the store is within its capacity; for an open with a smaller one."""
        for _ in range(_ROUNDS):
            with self._index.env.begin(write=True) as txn:
                writer = IndexWriter(self._index, txn)
                room = self._room(writer, no_growth=False)
                excess = writer.disk_bytes - room.disk_bytes
                if excess <= 0:
                    return
                if self._drain(writer, Counter(), excess) < excess:
                    self._evict(writer, txn, [], (), room)
                writer.flush()

    # helpers

    def _round(
        self,
        todo: list[Pending],
        held: Callable[[], Collection[bytes]],
        touches: Mapping[bytes, int],
        no_growth: bool,
    ) -> tuple[list[Pending], dict[int, PutOutcome]]:
        """Store all of `todo` in one transaction, or only evict for it; returns what is (still) to be stored, and outcomes."""
        with self._index.env.begin(write=True) as txn:
            writer = IndexWriter(self._index, txn)
            for key, used_ns in touches.items():
                writer.touch(key, used_ns)
            room = self._room(writer, no_growth)
            if self._fitting(writer, txn, todo, room) == len(todo):
                outcomes = self._store(writer, todo, room)
                if self._durable:
                    self._slabs.sync()
            else:
                outcomes = {}
                self._evict(writer, txn, todo, held(), room)
                todo = todo[: self._fitting(writer, txn, todo, room)]
                writer.flush()
        return todo, outcomes

    def _spare_bytes(self) -> int:
        vfs = os.statvfs(self._slabs.folder)
        spare = vfs.f_bavail * vfs.f_frsize - self._limits.free_floor_bytes
        if spare < 0:
            self._count_error("floor")
        return spare

    def _room(self, writer: IndexWriter, no_growth: bool) -> _Room:
        """What the capacity leaves, the file system's own blocks (maps of extents) and a dead writer's leavings counted."""
        unknown = self._slabs.disk_bytes(writer.slabs) - writer.disk_bytes
        budget = self._limits.capacity_bytes - self.overhead_bytes - _MARGIN_BYTES - max(0, unknown)
        growth = 0 if no_growth else max(0, self._spare_bytes())
        limit = min(budget, writer.disk_bytes + growth)
        return _Room(limit, limit, self._max_pages)

    def _fitting(self, writer: IndexWriter, txn: lmdb.Transaction, todo: Sequence[Pending], room: _Room) -> int:
        """Count the leading records that fit beside what is in use."""
        if not todo:
            return 0
        quota = self._limits.quotas.get(todo[0].space.info.tenant)
        tenant_bytes = self._tenant_bytes(writer, txn, todo[0].space.info.tenant) if quota is not None else 0
        live, pages = writer.live_bytes, writer.pages
        if quota is None and pages + len(todo) <= room.pages:
            most = sum(record.blocks for record in todo) * BLOCK_BYTES
            if live + most <= room.live_bytes:
                return len(todo)
        for count, record in enumerate(todo):
            if writer.entry(record.ref.key) is not None:
                continue
            size = record.blocks * BLOCK_BYTES
            live, pages, tenant_bytes = live + size, pages + 1, tenant_bytes + size
            if live > room.live_bytes or pages > room.pages or (quota is not None and tenant_bytes > quota):
                return count
        return len(todo)

    def _evict(
        self, writer: IndexWriter, txn: lmdb.Transaction, todo: Sequence[Pending], held: Collection[bytes], room: _Room
    ) -> None:
        """Remove leaves: the tenant's own while it is over its quota, then anyone's. A little more than needed goes, so that
        not every chunk has to evict."""
        need = sum(record.blocks for record in todo if writer.entry(record.ref.key) is None) * BLOCK_BYTES
        if todo and (quota := self._limits.quotas.get(todo[0].space.info.tenant)) is not None:
            numbers = self._tenant_spaces(txn, todo[0].space.info.tenant)
            self.evicted_pages += writer.evict(
                numbers, held, lambda: sum(writer.space_bytes(number) for number in numbers) + need <= quota
            )
        live = room.live_bytes - need - min(room.live_bytes // 64, _SLACK * need)
        pages = room.pages - len(todo) - min(room.pages // 64, _SLACK * len(todo))
        everyone = range(1, self._index.count_spaces(txn) + 1)
        self.evicted_pages += writer.evict(everyone, held, lambda: writer.live_bytes <= live and writer.pages <= pages)

    def _tenant_spaces(self, txn: lmdb.Transaction, tenant: str) -> list[int]:
        return [space.number for space in self._index.all_spaces(txn) if space.info.tenant == tenant]

    def _tenant_bytes(self, writer: IndexWriter, txn: lmdb.Transaction, tenant: str) -> int:
        return sum(writer.space_bytes(number) for number in self._tenant_spaces(txn, tenant))

    def _store(self, writer: IndexWriter, todo: Sequence[Pending], room: _Room) -> dict[int, PutOutcome]:
        fresh: dict[int, list[Pending]] = defaultdict(list)
        outcomes = dict.fromkeys([record.at for record in todo], PutOutcome.STORED)
        now_ns = self._clock()
        keys = [record.ref.key for record in todo]
        there = writer.look_up(keys)
        for record, key in zip(todo, keys, strict=True):
            if key in there:
                outcomes[record.at] = PutOutcome.PRESENT
                writer.touch(key, now_ns)
            else:
                fresh[record.blocks].append(record)
                there.add(key)
        needs = Counter({blocks: len(records) for blocks, records in fresh.items()})
        growth = sum(writer.growth_bytes(blocks, count) for blocks, count in needs.items())
        self._drain(writer, needs, writer.disk_bytes + growth - room.disk_bytes)
        growing: list[_Growing] = []
        try:
            parts = [
                part
                for blocks, records in fresh.items()
                for part in _parts(blocks, self._allocate(writer, blocks, len(records), growing), records)
            ]
            self._write(parts, partial(_enter, writer, parts, now_ns))
        except BaseException:
            self._take_back(growing)
            raise
        return outcomes

    def _write(self, parts: Sequence[_Part], enter: Callable[[], None]) -> None:
        """Write records to their slots part by part, while the helper computes the sums of the next and at last calls `enter`.

        It is given no more than fits beside each write, so that the GIL is free by the time that a write has ended.
        """
        if not parts:
            enter()
            return
        sealed = _seal_all(parts[0])
        for part, following in pairwise(parts):
            sealed = self._helper.both(partial(self._slabs.write, part.blocks, sealed), partial(_seal_all, following))
        self._helper.both(partial(self._slabs.write, parts[-1].blocks, sealed), enter)

    def _allocate(self, writer: IndexWriter, blocks: int, count: int, growing: list[_Growing]) -> list[int]:
        """Take slots of one size, those at the file's end with their blocks: one extent instead of one a page cache folio."""
        end = writer.slabs.get(blocks, SlabCount()).slots
        taken = writer.allocate(blocks, count)
        growing.append(_Growing(blocks, end, taken.holes))
        if taken.new:
            self._slabs.trim(blocks, end)
            self._slabs.reserve(blocks, end, len(taken.new))
        return taken.slots()

    def _take_back(self, growing: Sequence[_Growing]) -> None:
        """Give back the blocks of slots that had none before, after writes in vain."""
        with contextlib.suppress(OSError):  # the next open tidies up
            for blocks, end, holes in growing:
                for slot in holes:
                    self._slabs.wipe(blocks, slot)
                self._slabs.trim(blocks, end)

    def _drain(self, writer: IndexWriter, needs: Mapping[int, int], excess_bytes: int) -> int:
        """Punch out free slots that `needs` (slots by size) leaves over, up to `excess_bytes`; returns the bytes freed."""
        freed = 0
        for blocks, slab in list(writer.slabs.items()):
            size = blocks * BLOCK_BYTES
            count = min(slab.backed - needs.get(blocks, 0), -(-(excess_bytes - freed) // size))
            if count > 0:
                for slot in writer.drain(blocks, count):
                    self._slabs.wipe(blocks, slot)
                freed += count * size
        return freed


def _parts(blocks: int, slots: Sequence[int], records: Sequence[Pending]) -> Iterator[_Part]:
    """Cut records of one size so that the sums of a part take no longer than the writing of the one before: half its size."""
    cuts = sorted({-(-len(records) * share // 15) for share in (0, 1, 3, 7, 15)})
    for at, end in pairwise(cuts):
        yield _Part(blocks, slots[at:end], records[at:end])


def _seal_all(part: _Part) -> list[Gather]:
    payloads = [record.payload for record in part.records]
    sealed = [seal(frame(record.ref, payload.nbytes), payload) for record, payload in zip(part.records, payloads, strict=True)]
    return gather(part.blocks, part.slots, sealed, payloads)


def _enter(writer: IndexWriter, parts: Sequence[_Part], now_ns: int) -> None:
    """Enter records into the transaction."""
    for part in parts:
        for slot, record in zip(part.slots, part.records, strict=True):
            writer.insert(record.ref.key, _entry_of(record, slot, now_ns))
    writer.flush()


def _entry_of(record: Pending, slot: int, now_ns: int) -> Entry:
    ref = record.ref
    parent_key = b"" if ref.parent_key == ref.namespace else ref.parent_key
    size, number = record.payload.nbytes, record.space.number
    return Entry(0, now_ns, record.blocks, slot, size, len(ref.tokens), number, 0, parent_key)
