"""The index of the LMDB store: which page is in which slot, in which order pages go, and what all of it adds up to.

| database   | key                            | value                                     |
| ---------- | ------------------------------ | ----------------------------------------- |
| entries    | page key                       | Entry                                     |
| leaves     | space, last use, sequence (BE) | page key; pages without children, in order |
| orphans    | page key                       | number of children of a page not stored   |
| free       | blocks, is hole, slot (BE)     | empty                                     |
| slabs      | blocks (BE)                    | SlabCount                                 |
| namespaces | digest                         | JSON: number, tenant, labels              |
| spaces     | number (BE)                    | SpaceCount                                |
| meta       | `totals`                       | Totals                                    |

A namespace's number in the index is its *space*. All that changes goes through one `IndexWriter` a transaction, under LMDB's
write lock, which holds across processes.
"""

from __future__ import annotations

import heapq
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from storage.base import NamespaceInfo
from storage.record import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

__all__ = [
    "Allocation",
    "Entry",
    "Index",
    "IndexWriter",
    "SlabCount",
    "Space",
    "SpaceCount",
    "Totals",
    "decode_entry",
    "slot_fields",
]

MAX_READERS = 1024

_ENTRY = struct.Struct("<QQIIIIII")
_SLOT = struct.Struct("<Q8xIIII")
_LEAF = struct.Struct(">IQQ")
_FREE = struct.Struct(">IBI")
_U32 = struct.Struct(">I")
_SLAB = struct.Struct("<III")
_SPACE = struct.Struct("<QQQ")
_TOTALS = struct.Struct("<QQQQ")
_TOTALS_KEY = b"totals"

slot_fields = _SLOT.unpack_from
"""`slot_fields(raw)`: (seq, blocks, slot, payload bytes, token bytes) of a value of `entries`: all that a reader needs."""


@dataclass(slots=True)
class Entry:
    """Where a page is. The IndexWriter that gave it out owns it.

    seq: never given twice, so equal `seq` means the same record in the same slot.
    used_ns: Unix time of the last use of the page, or of a child evicted since. parent_key: empty for a first page.
    """

    seq: int
    used_ns: int
    blocks: int
    slot: int
    payload_bytes: int
    token_bytes: int
    space: int
    children: int
    parent_key: bytes

    @property
    def slot_bytes(self) -> int:
        return self.blocks * BLOCK_BYTES


class SlabCount(NamedTuple):
    """Slots of one size: all of the file's, those free with blocks behind them, those free and punched out."""

    slots: int = 0
    backed: int = 0
    holes: int = 0

    @property
    def used(self) -> int:
        return self.slots - self.backed - self.holes


class SpaceCount(NamedTuple):
    """What one namespace holds; bytes are whole slots."""

    pages: int = 0
    tokens: int = 0
    bytes: int = 0


class Totals(NamedTuple):
    """live_bytes: slots in use. disk_bytes: those and the free slots that still have blocks."""

    seq: int = 0
    pages: int = 0
    live_bytes: int = 0
    disk_bytes: int = 0


class Allocation(NamedTuple):
    """Slots taken for new records; `backed` ones need no new blocks."""

    backed: tuple[int, ...]
    holes: tuple[int, ...]
    new: tuple[int, ...]

    def slots(self) -> list[int]:
        """All of them, in the file's order."""
        return sorted(self.backed + self.holes + self.new)


class Space(NamedTuple):
    """A registered namespace and its number."""

    number: int
    info: NamespaceInfo


def decode_entry(raw: bytes | memoryview) -> Entry:
    """Decode a value of `entries`."""
    seq, used_ns, blocks, slot, payload_bytes, token_bytes, space, children = _ENTRY.unpack_from(raw)
    parent_key = bytes(raw[_ENTRY.size :])
    return Entry(seq, used_ns, blocks, slot, payload_bytes, token_bytes, space, children, parent_key)


def _encode_entry(entry: Entry) -> bytes:
    numbers = _ENTRY.pack(
        entry.seq,
        entry.used_ns,
        entry.blocks,
        entry.slot,
        entry.payload_bytes,
        entry.token_bytes,
        entry.space,
        entry.children,
    )
    return numbers + entry.parent_key


def _leaf_key(entry: Entry | None) -> bytes | None:
    """Place in the order of eviction, of a page without children."""
    if entry is None or entry.children:
        return None
    return _LEAF.pack(entry.space, entry.used_ns, entry.seq)


class Index:
    """The LMDB environment and its databases. Raises lmdb.Error throughout; the store translates."""

    def __init__(self, path: Path, map_bytes: int, durable_commits: bool, readonly: bool = False) -> None:
        self.env = lmdb.open(
            str(path),
            subdir=False,
            map_size=map_bytes,
            max_dbs=8,
            max_readers=MAX_READERS,
            sync=durable_commits,
            metasync=durable_commits,
            readahead=False,
            readonly=readonly,
            mode=0o600,
        )
        names = ("entries", "leaves", "orphans", "free", "slabs", "namespaces", "spaces", "meta")
        opened = [self.env.open_db(name.encode(), create=not readonly) for name in names]
        self.entries, self.leaves, self.orphans, self.free, self.slabs, self.namespaces, self.spaces, self.meta = opened

    def read(self) -> lmdb.Transaction:
        """Begin a snapshot; any thread."""
        return self.env.begin(db=self.entries)

    def totals(self, txn: lmdb.Transaction) -> Totals:
        raw = txn.get(_TOTALS_KEY, db=self.meta)
        return Totals(*_TOTALS.unpack(raw)) if raw else Totals()

    def slab_counts(self, txn: lmdb.Transaction) -> dict[int, SlabCount]:
        """SlabCount by slot size in blocks."""
        cursor = txn.cursor(db=self.slabs)
        return {_U32.unpack(key)[0]: SlabCount(*_SLAB.unpack(raw)) for key, raw in cursor}

    def all_spaces(self, txn: lmdb.Transaction) -> list[Space]:
        return [_decode_space(digest, raw) for digest, raw in txn.cursor(db=self.namespaces)]

    def count_spaces(self, txn: lmdb.Transaction) -> int:
        """Registered namespaces; their numbers are 1 to this."""
        return int(txn.stat(self.namespaces)["entries"])

    def space(self, txn: lmdb.Transaction, digest: bytes) -> Space | None:
        raw = txn.get(digest, db=self.namespaces)
        return _decode_space(digest, raw) if raw else None

    def space_count(self, txn: lmdb.Transaction, number: int) -> SpaceCount:
        raw = txn.get(_U32.pack(number), db=self.spaces)
        return SpaceCount(*_SPACE.unpack(raw)) if raw else SpaceCount()

    def leaf_span_ns(self, txn: lmdb.Transaction, number: int) -> tuple[int, int]:
        """Last use of the first and of the last leaf in a namespace's eviction order; zeros if it holds nothing."""
        cursor = txn.cursor(db=self.leaves)
        if not cursor.set_range(_U32.pack(number)) or _LEAF.unpack(cursor.key())[0] != number:
            return 0, 0
        first = _LEAF.unpack(cursor.key())[1]
        there = cursor.prev() if cursor.set_range(_U32.pack(number + 1)) else cursor.last()
        assert there
        return first, _LEAF.unpack(cursor.key())[1]

    def free_slots(self, txn: lmdb.Transaction) -> Iterator[tuple[int, bool, int]]:
        """Yield (blocks, is hole, slot) of every free slot."""
        for key in txn.cursor(db=self.free).iternext(values=False):
            blocks, hole, slot = _FREE.unpack(key)
            yield blocks, bool(hole), slot

    def leaf_order(self, txn: lmdb.Transaction, number: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield (last use, seq, page key) of a namespace's leaves, the next victim first."""
        cursor = txn.cursor(db=self.leaves)
        if not cursor.set_range(_U32.pack(number)):
            return
        for key, page_key in cursor:
            space, used_ns, seq = _LEAF.unpack(key)
            if space != number:
                return
            yield used_ns, seq, bytes(page_key)


def _decode_space(digest: bytes | memoryview, raw: bytes | memoryview) -> Space:
    fields = json.loads(bytes(raw))
    return Space(fields["number"], NamespaceInfo(bytes(digest), fields["labels"], fields["tenant"]))


class IndexWriter:
    """Changes the index within one write transaction. `flush` must be called before the commit.

    Entries and counts are read once, changed in memory and written once, so a chain of pages costs one write a page. Slots
    released here are not given out again before the commit: until then the old entry is what other readers see.
    """

    def __init__(self, index: Index, txn: lmdb.Transaction) -> None:
        self._index = index
        self._txn = txn
        self._entries: dict[bytes, Entry | None] = {}
        self._stored_leaf: dict[bytes, bytes | None] = {}
        self._changed: dict[bytes, None] = {}
        self._released: list[tuple[int, int]] = []
        self._spaces: dict[int, list[int]] = {}
        self._has_orphans = bool(txn.stat(index.orphans)["entries"])
        self.seq, self.pages, self.live_bytes, self.disk_bytes = index.totals(txn)
        self.slabs = index.slab_counts(txn)

    def entry(self, key: bytes) -> Entry | None:
        """The entry as changed so far; None for the empty key."""
        if key in self._entries:
            return self._entries[key]
        raw = self._txn.get(key, db=self._index.entries) if key else None
        entry = self._entries[key] = decode_entry(raw) if raw else None
        self._stored_leaf[key] = _leaf_key(entry)
        return entry

    def space_bytes(self, number: int) -> int:
        """Bytes of slots that a namespace holds."""
        return self._space(number)[2]

    def add_space(self, info: NamespaceInfo) -> Space:
        """Register a namespace, or renew its labels; tenant and number of a known one stay."""
        known = self._index.space(self._txn, info.digest)
        number = known.number if known else self._index.count_spaces(self._txn) + 1
        tenant = known.info.tenant if known else info.tenant
        fields = {"number": number, "tenant": tenant, "labels": dict(info.labels)}
        self._txn.put(info.digest, json.dumps(fields).encode(), db=self._index.namespaces)
        return Space(number, NamespaceInfo(info.digest, dict(info.labels), tenant))

    def insert(self, key: bytes, entry: Entry) -> None:
        """Add a page whose slot is allocated. `entry.seq` and `entry.children` are filled in here."""
        assert self.entry(key) is None
        self.seq += 1
        entry.seq = self.seq
        entry.children = self._adopt_orphans(key)
        self._entries[key] = entry
        self._changed[key] = None
        self._count(entry, 1)
        self._add_child(entry.parent_key, 1)

    def remove(self, key: bytes) -> Entry:
        """Drop a page; its slot is free after the commit, its children become orphans."""
        entry = self.entry(key)
        assert entry is not None
        self._entries[key] = None
        self._changed[key] = None
        self._released.append((entry.blocks, entry.slot))
        self._count(entry, -1)
        self._add_child(entry.parent_key, -1)
        if entry.children:
            self._txn.put(key, _U32.pack(entry.children), db=self._index.orphans)
            self._has_orphans = True
        return entry

    def touch(self, key: bytes, used_ns: int) -> None:
        """Move a page's last use forward, never back."""
        entry = self.entry(key)
        if entry is not None and entry.used_ns < used_ns:
            entry.used_ns = used_ns
            self._changed[key] = None

    def evict(
        self, spaces: Collection[int], held: Collection[bytes], enough: Callable[[], bool], before_ns: int = 2**63
    ) -> int:
        """Remove leaves of some namespaces, least recently used first, until `enough` or none was used before `before_ns`.
        Returns how many went.

        A page that loses its last child is a leaf as recent as that child was. Pages in `held` stay.
        """
        self.flush()
        orders = [self._index.leaf_order(self._txn, number) for number in spaces]
        heads = [(*head, at) for at, order in enumerate(orders) if (head := next(order, None))]
        heapq.heapify(heads)
        evicted = 0
        while heads and heads[0][0] < before_ns and not enough():
            used_ns, seq, key, at = heapq.heappop(heads)
            if at >= 0 and (following := next(orders[at], None)):
                heapq.heappush(heads, (*following, at))
            entry = self.entry(key)
            if key in held or entry is None or entry.seq != seq or entry.children:
                continue
            self.remove(key)
            evicted += 1
            self.touch(entry.parent_key, used_ns)
            parent = self.entry(entry.parent_key)
            if parent is not None and not parent.children:
                heapq.heappush(heads, (parent.used_ns, parent.seq, entry.parent_key, -1))
        return evicted

    def allocate(self, blocks: int, count: int) -> Allocation:
        """Take slots: free ones with blocks, then holes, then new ones at the file's end."""
        slab = self.slabs.get(blocks, SlabCount())
        backed = self._take_free(blocks, 0, min(count, slab.backed))
        holes = self._take_free(blocks, 1, min(count - len(backed), slab.holes))
        new = range(slab.slots, slab.slots + count - len(backed) - len(holes))
        self.slabs[blocks] = SlabCount(slab.slots + len(new), slab.backed - len(backed), slab.holes - len(holes))
        grown = (len(holes) + len(new)) * blocks * BLOCK_BYTES
        self.disk_bytes += grown
        return Allocation(tuple(backed), tuple(holes), tuple(new))

    def growth_bytes(self, blocks: int, count: int) -> int:
        """Bytes that `allocate` would add to the files."""
        return max(0, count - self.slabs.get(blocks, SlabCount()).backed) * blocks * BLOCK_BYTES

    def drain(self, blocks: int, count: int) -> list[int]:
        """Turn up to `count` free slots with blocks into holes; the caller punches them out before the commit."""
        slab = self.slabs[blocks]
        slots = self._take_free(blocks, 0, min(count, slab.backed))
        for slot in slots:
            self._txn.put(_FREE.pack(blocks, 1, slot), b"", db=self._index.free)
        self.slabs[blocks] = slab._replace(backed=slab.backed - len(slots), holes=slab.holes + len(slots))
        self.disk_bytes -= len(slots) * blocks * BLOCK_BYTES
        return slots

    def cut_tail(self, blocks: int) -> int:
        """Forget the holes at the end of a slab file; returns the slots it is left with."""
        slab = self.slabs[blocks]
        slots, holes = slab.slots, slab.holes
        while holes and self._txn.delete(_FREE.pack(blocks, 1, slots - 1), db=self._index.free):
            slots, holes = slots - 1, holes - 1
        self.slabs[blocks] = slab._replace(slots=slots, holes=holes)
        return slots

    def give_back_hole(self, blocks: int, slot: int) -> None:
        """Return an allocated slot whose blocks were punched out."""
        self._txn.put(_FREE.pack(blocks, 1, slot), b"", db=self._index.free)
        slab = self.slabs[blocks]
        self.slabs[blocks] = slab._replace(holes=slab.holes + 1)
        self.disk_bytes -= blocks * BLOCK_BYTES

    def flush(self) -> None:
        """Write all that changed into the transaction."""
        for key in self._changed:
            self._write_entry(key, self._entries[key])
        self._changed.clear()
        for blocks, slot in self._released:
            self._txn.put(_FREE.pack(blocks, 0, slot), b"", db=self._index.free)
            slab = self.slabs[blocks]
            self.slabs[blocks] = slab._replace(backed=slab.backed + 1)
        self._released.clear()
        for blocks, slab in self.slabs.items():
            self._txn.put(_U32.pack(blocks), _SLAB.pack(*slab), db=self._index.slabs)
        for number, count in self._spaces.items():
            self._txn.put(_U32.pack(number), _SPACE.pack(*count), db=self._index.spaces)
        totals = _TOTALS.pack(self.seq, self.pages, self.live_bytes, self.disk_bytes)
        self._txn.put(_TOTALS_KEY, totals, db=self._index.meta)

    # helpers

    def _write_entry(self, key: bytes, entry: Entry | None) -> None:
        old_leaf, new_leaf = self._stored_leaf[key], _leaf_key(entry)
        if entry is None:
            self._txn.delete(key, db=self._index.entries)
        else:
            self._txn.put(key, _encode_entry(entry), db=self._index.entries)
        if old_leaf == new_leaf:
            return
        self._stored_leaf[key] = new_leaf
        if old_leaf is not None:
            self._txn.delete(old_leaf, db=self._index.leaves)
        if new_leaf is not None:
            self._txn.put(new_leaf, key, db=self._index.leaves)

    def _add_child(self, parent_key: bytes, change: int) -> None:
        if not parent_key:
            return
        parent = self.entry(parent_key)
        if parent is not None:
            parent.children += change
            self._changed[parent_key] = None
            return
        raw = self._txn.get(parent_key, db=self._index.orphans)
        count = (_U32.unpack(raw)[0] if raw else 0) + change
        if count > 0:
            self._txn.put(parent_key, _U32.pack(count), db=self._index.orphans)
            self._has_orphans = True
        elif raw:
            self._txn.delete(parent_key, db=self._index.orphans)

    def _adopt_orphans(self, key: bytes) -> int:
        raw = self._txn.pop(key, db=self._index.orphans) if self._has_orphans else None
        return int(_U32.unpack(raw)[0]) if raw else 0

    def _space(self, number: int) -> list[int]:
        """Pages, tokens and bytes of a namespace, to be changed in place."""
        if number not in self._spaces:
            self._spaces[number] = list(self._index.space_count(self._txn, number))
        return self._spaces[number]

    def _count(self, entry: Entry, sign: int) -> None:
        size = sign * entry.slot_bytes
        self.pages += sign
        self.live_bytes += size
        space = self._space(entry.space)
        space[0] += sign
        space[1] += sign * (entry.token_bytes // 4)
        space[2] += size

    def _take_free(self, blocks: int, hole: int, count: int) -> list[int]:
        if not count:
            return []
        cursor = self._txn.cursor(db=self._index.free)
        there = cursor.set_range(_FREE.pack(blocks, hole, 0))
        slots: list[int] = []
        while there and len(slots) < count:
            found_blocks, found_hole, slot = _FREE.unpack(cursor.key())
            assert (found_blocks, found_hole) == (blocks, hole)
            slots.append(slot)
            there = cursor.delete()
        assert len(slots) == count
        return slots
