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

A namespace's number in the index is its *space*. All changes go through `IndexWriter`.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, NamedTuple

import lmdb
import msgspec

from storage.base import NamespaceInfo
from storage.record import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "FREE_KEY",
    "LEAF_KEY",
    "NUMBER_KEY",
    "SLAB_VALUE",
    "SPACE_VALUE",
    "TOTALS_KEY",
    "TOTALS_VALUE",
    "Allocation",
    "Entry",
    "Index",
    "SlabCount",
    "Space",
    "SpaceCount",
    "Totals",
    "decode_entry",
    "encode_entry",
    "leaf_key",
    "slot_fields",
]

MAX_READERS = 1024

_ENTRY = struct.Struct("<QQIIIIII")
_SLOT = struct.Struct("<Q8xIIII")
# keys are big-endian, so that they sort as their numbers do
LEAF_KEY = struct.Struct(">IQQ")
FREE_KEY = struct.Struct(">IBI")
NUMBER_KEY = struct.Struct(">I")
SLAB_VALUE = struct.Struct("<III")
SPACE_VALUE = struct.Struct("<QQQ")
TOTALS_VALUE = struct.Struct("<QQQQ")
TOTALS_KEY = b"totals"

slot_fields = _SLOT.unpack_from
"""`slot_fields(raw)`: (seq, blocks, slot, payload bytes, token bytes) of a value of `entries`: all that a reader needs."""


class Entry(msgspec.Struct, gc=False):
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


def encode_entry(entry: Entry) -> bytes:
    """Encode a value of `entries`."""
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


def leaf_key(entry: Entry | None) -> bytes | None:
    """Place in the order of eviction, of a page without children."""
    if entry is None or entry.children:
        return None
    return LEAF_KEY.pack(entry.space, entry.used_ns, entry.seq)


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
        raw = txn.get(TOTALS_KEY, db=self.meta)
        return Totals(*TOTALS_VALUE.unpack(raw)) if raw else Totals()

    def slab_counts(self, txn: lmdb.Transaction) -> dict[int, SlabCount]:
        """SlabCount by slot size in blocks."""
        cursor = txn.cursor(db=self.slabs)
        return {NUMBER_KEY.unpack(key)[0]: SlabCount(*SLAB_VALUE.unpack(raw)) for key, raw in cursor}

    def all_spaces(self, txn: lmdb.Transaction) -> list[Space]:
        return [_decode_space(digest, raw) for digest, raw in txn.cursor(db=self.namespaces)]

    def count_spaces(self, txn: lmdb.Transaction) -> int:
        """Registered namespaces; their numbers are 1 to this."""
        return int(txn.stat(self.namespaces)["entries"])

    def space(self, txn: lmdb.Transaction, digest: bytes) -> Space | None:
        raw = txn.get(digest, db=self.namespaces)
        return _decode_space(digest, raw) if raw else None

    def space_count(self, txn: lmdb.Transaction, number: int) -> SpaceCount:
        raw = txn.get(NUMBER_KEY.pack(number), db=self.spaces)
        return SpaceCount(*SPACE_VALUE.unpack(raw)) if raw else SpaceCount()

    def leaf_span_ns(self, txn: lmdb.Transaction, number: int) -> tuple[int, int]:
        """Last use of the first and of the last leaf in a namespace's eviction order; zeros if it holds nothing."""
        cursor = txn.cursor(db=self.leaves)
        if not cursor.set_range(NUMBER_KEY.pack(number)) or LEAF_KEY.unpack(cursor.key())[0] != number:
            return 0, 0
        first = LEAF_KEY.unpack(cursor.key())[1]
        there = cursor.prev() if cursor.set_range(NUMBER_KEY.pack(number + 1)) else cursor.last()
        assert there
        return first, LEAF_KEY.unpack(cursor.key())[1]

    def free_slots(self, txn: lmdb.Transaction) -> Iterator[tuple[int, bool, int]]:
        """Yield (blocks, is hole, slot) of every free slot."""
        for key in txn.cursor(db=self.free).iternext(values=False):
            blocks, hole, slot = FREE_KEY.unpack(key)
            yield blocks, bool(hole), slot

    def leaf_order(self, txn: lmdb.Transaction, number: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield (last use, seq, page key) of a namespace's leaves, the next victim first."""
        cursor = txn.cursor(db=self.leaves)
        if not cursor.set_range(NUMBER_KEY.pack(number)):
            return
        for key, page_key in cursor:
            space, used_ns, seq = LEAF_KEY.unpack(key)
            if space != number:
                return
            yield used_ns, seq, bytes(page_key)


def _decode_space(digest: bytes | memoryview, raw: bytes | memoryview) -> Space:
    fields = json.loads(bytes(raw))
    return Space(fields["number"], NamespaceInfo(bytes(digest), fields["labels"], fields["tenant"]))
