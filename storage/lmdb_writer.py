"""Changes to the LMDB store's index: one writer a transaction, under LMDB's write lock, which holds across processes."""

from __future__ import annotations

import heapq
import json
from typing import TYPE_CHECKING

from storage.base import NamespaceInfo
from storage.lmdb_index import (
    FREE_KEY,
    NUMBER_KEY,
    SLAB_VALUE,
    SPACE_VALUE,
    TOTALS_KEY,
    TOTALS_VALUE,
    Allocation,
    Entry,
    SlabCount,
    Space,
    decode_entry,
    encode_entry,
    leaf_key,
)
from storage.record import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import lmdb

    from storage.lmdb_index import Index

__all__ = ["IndexWriter"]


class IndexWriter:
    """Changes the index within one write transaction. `flush` must be called before the commit.

    Entries and counts are read once, changed in memory and written once, so a chain of pages costs one write a page. Slots
    released here are not given out again before the commit: until then the old entry is what other readers see.
    """

    def __init__(self, index: Index, txn: lmdb.Transaction) -> None:
        self._index = index
        self._txn = txn
        self._entries: dict[bytes, Entry | None] = {}
        self._stored_leaf: dict[bytes, bytes] = {}
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
        return self._keep(key, self._txn.get(key, db=self._index.entries) if key else None)

    def look_up(self, keys: Sequence[bytes]) -> set[bytes]:
        """Have the entries of many keys at hand for `entry`, and return the keys that have one. One call for all takes half the
        time of one a key."""
        known = self._entries.keys() & keys
        there = {key for key in known if self._entries[key] is not None}
        wanted = [key for key in keys if key not in known] if known else keys
        self._entries.update(dict.fromkeys(wanted))
        for key, raw in self._txn.cursor(db=self._index.entries).getmulti(wanted):
            self._keep(bytes(key), raw)
            there.add(bytes(key))
        return there

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
        """Add a page that `entry` did not find, whose slot is allocated. Its `seq` and `children` are filled in here."""
        assert self._entries[key] is None
        self.seq += 1
        entry.seq = self.seq
        if self._has_orphans:
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
            self._txn.put(key, NUMBER_KEY.pack(entry.children), db=self._index.orphans)
            self._has_orphans = True
        return entry

    def touch(self, key: bytes, used_ns: int) -> None:
        """Move a page's last use forward, never back."""
        entry = self.entry(key)
        if entry is not None and entry.used_ns < used_ns:
            entry.used_ns = used_ns
            self._changed[key] = None

    def turn_back(self, key: bytes, used_ns: int) -> None:
        """Move a page's last use back, if it is later."""
        entry = self.entry(key)
        if entry is not None and entry.used_ns > used_ns:
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
            self._txn.put(FREE_KEY.pack(blocks, 1, slot), b"", db=self._index.free)
        self.slabs[blocks] = slab._replace(backed=slab.backed - len(slots), holes=slab.holes + len(slots))
        self.disk_bytes -= len(slots) * blocks * BLOCK_BYTES
        return slots

    def cut_tail(self, blocks: int) -> int:
        """Forget the holes at the end of a slab file; returns the slots it is left with."""
        slab = self.slabs[blocks]
        slots, holes = slab.slots, slab.holes
        while holes and self._txn.delete(FREE_KEY.pack(blocks, 1, slots - 1), db=self._index.free):
            slots, holes = slots - 1, holes - 1
        self.slabs[blocks] = slab._replace(slots=slots, holes=holes)
        return slots

    def give_back_hole(self, blocks: int, slot: int) -> None:
        """Return an allocated slot whose blocks were punched out."""
        self._txn.put(FREE_KEY.pack(blocks, 1, slot), b"", db=self._index.free)
        slab = self.slabs[blocks]
        self.slabs[blocks] = slab._replace(holes=slab.holes + 1)
        self.disk_bytes -= blocks * BLOCK_BYTES

    def flush(self) -> None:
        """Write all that changed into the transaction."""
        for key in self._changed:
            self._write_entry(key, self._entries[key])
        self._changed.clear()
        for blocks, slot in self._released:
            self._txn.put(FREE_KEY.pack(blocks, 0, slot), b"", db=self._index.free)
            slab = self.slabs[blocks]
            self.slabs[blocks] = slab._replace(backed=slab.backed + 1)
        self._released.clear()
        for blocks, slab in self.slabs.items():
            self._txn.put(NUMBER_KEY.pack(blocks), SLAB_VALUE.pack(*slab), db=self._index.slabs)
        for number, count in self._spaces.items():
            self._txn.put(NUMBER_KEY.pack(number), SPACE_VALUE.pack(*count), db=self._index.spaces)
        totals = TOTALS_VALUE.pack(self.seq, self.pages, self.live_bytes, self.disk_bytes)
        self._txn.put(TOTALS_KEY, totals, db=self._index.meta)

    # helpers

    def _keep(self, key: bytes, raw: bytes | memoryview | None) -> Entry | None:
        entry = self._entries[key] = decode_entry(raw) if raw is not None else None
        if (leaf := leaf_key(entry)) is not None:
            self._stored_leaf[key] = leaf
        return entry

    def _write_entry(self, key: bytes, entry: Entry | None) -> None:
        old_leaf, new_leaf = self._stored_leaf.get(key), leaf_key(entry)
        if entry is None:
            self._txn.delete(key, db=self._index.entries)
        else:
            self._txn.put(key, encode_entry(entry), db=self._index.entries)
        if old_leaf == new_leaf:
            return
        if old_leaf is not None:
            del self._stored_leaf[key]
            self._txn.delete(old_leaf, db=self._index.leaves)
        if new_leaf is not None:
            self._stored_leaf[key] = new_leaf
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
        count = (NUMBER_KEY.unpack(raw)[0] if raw else 0) + change
        if count > 0:
            self._txn.put(parent_key, NUMBER_KEY.pack(count), db=self._index.orphans)
            self._has_orphans = True
        elif raw:
            self._txn.delete(parent_key, db=self._index.orphans)

    def _adopt_orphans(self, key: bytes) -> int:
        raw = self._txn.pop(key, db=self._index.orphans)
        return int(NUMBER_KEY.unpack(raw)[0]) if raw else 0

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
        there = cursor.set_range(FREE_KEY.pack(blocks, hole, 0))
        slots: list[int] = []
        while there and len(slots) < count:
            found_blocks, found_hole, slot = FREE_KEY.unpack(cursor.key())
            assert (found_blocks, found_hole) == (blocks, hole)
            slots.append(slot)
            there = cursor.delete()
        assert len(slots) == count
        return slots
