"""Checks an index against itself: every database decoded, every slot owned once, every sum recounted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from storage.lmdb_index import SpaceCount, decode_entry
from storage.record import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import lmdb

    from storage.lmdb_index import Entry, Index

__all__ = ["audit_children", "audit_index"]


def audit_index(index: Index, txn: lmdb.Transaction) -> Iterator[str]:
    """Yield one line a contradiction found in a snapshot. A damaged B-tree may raise lmdb.Error or kill the process."""
    slabs = index.slab_counts(txn)
    owners = {blocks: bytearray(count.slots) for blocks, count in slabs.items()}
    spaces: Counter[tuple[int, str]] = Counter()
    leaves = pages = live = 0
    for key, raw in txn.cursor(db=index.entries):
        entry = decode_entry(raw)
        pages += 1
        live += entry.slot_bytes
        spaces.update({(entry.space, "pages"): 1, (entry.space, "tokens"): entry.token_bytes // 4})
        spaces[entry.space, "bytes"] += entry.slot_bytes
        yield from _own(owners, entry.blocks, entry.slot, f"page {key.hex()}")
        if not entry.children:
            leaves += 1
    for blocks, _, slot in index.free_slots(txn):
        yield from _own(owners, blocks, slot, "the free list")
    for blocks, owned in owners.items():
        if lost := owned.count(0):
            yield f"{lost} slots of {blocks} blocks belong to nobody"
    yield from _audit_leaves(index, txn, leaves)
    yield from _audit_sums(index, txn, pages, live)
    yield from _audit_spaces(index, txn, spaces)


def audit_children(index: Index, txn: lmdb.Transaction) -> Iterator[str]:
    """Yield one line a page whose count of children is wrong. Holds all parents' keys in memory."""
    children: Counter[bytes] = Counter()
    for _, raw in txn.cursor(db=index.entries):
        if parent_key := decode_entry(raw).parent_key:
            children[parent_key] += 1
    for key, raw in txn.cursor(db=index.entries):
        if decode_entry(raw).children != children.pop(bytes(key), 0):
            yield f"page {bytes(key).hex()} has another number of children"
    for key, raw in txn.cursor(db=index.orphans):
        if int.from_bytes(raw, "big") != children.pop(bytes(key), 0):
            yield f"missing page {bytes(key).hex()} has another number of children"
    if children:
        yield f"{len(children)} missing parents are not listed"


def _own(owners: dict[int, bytearray], blocks: int, slot: int, who: str) -> Iterator[str]:
    owned = owners.get(blocks)
    if owned is None or slot >= len(owned):
        yield f"{who} has slot {slot} of {blocks} blocks, which does not exist"
        return
    if owned[slot]:
        yield f"{who} has slot {slot} of {blocks} blocks, which has an owner"
    owned[slot] = 1


def _audit_leaves(index: Index, txn: lmdb.Transaction, expected: int) -> Iterator[str]:
    found = 0
    for space in index.all_spaces(txn):
        for used_ns, seq, key in index.leaf_order(txn, space.number):
            found += 1
            raw = txn.get(key, db=index.entries)
            entry: Entry | None = decode_entry(raw) if raw else None
            if entry is None or (entry.used_ns, entry.seq, entry.children) != (used_ns, seq, 0):
                yield f"leaf {key.hex()} is not a page without children"
    if found != expected or found != txn.stat(index.leaves)["entries"]:
        yield f"{found} leaves are listed, {expected} pages have no children"


def _audit_sums(index: Index, txn: lmdb.Transaction, pages: int, live: int) -> Iterator[str]:
    totals, slabs = index.totals(txn), index.slab_counts(txn)
    if (totals.pages, totals.live_bytes) != (pages, live):
        yield f"totals say {totals.pages} pages and {totals.live_bytes} bytes, a recount {pages} and {live}"
    disk = sum((count.slots - count.holes) * blocks * BLOCK_BYTES for blocks, count in slabs.items())
    if totals.disk_bytes != disk:
        yield f"totals say {totals.disk_bytes} bytes on disk, a recount {disk}"
    free: Counter[tuple[int, bool]] = Counter((blocks, hole) for blocks, hole, _ in index.free_slots(txn))
    for blocks, count in slabs.items():
        if (count.backed, count.holes) != (free[blocks, False], free[blocks, True]):
            yield f"the count of free slots of {blocks} blocks is wrong"


def _audit_spaces(index: Index, txn: lmdb.Transaction, recount: Counter[tuple[int, str]]) -> Iterator[str]:
    known = index.all_spaces(txn)
    for space in known:
        counted = SpaceCount(*(recount[space.number, field] for field in SpaceCount._fields))
        if counted != index.space_count(txn, space.number):
            yield f"namespace {space.info.digest.hex()} says other sums than a recount"
    if unknown := {number for number, _ in recount} - {space.number for space in known}:
        yield f"pages of unknown namespaces: {sorted(unknown)[:3]}"
