"""Builds an index anew from the records in the slab files: each record's header says all that the index knew of it.

The order of use is lost: all that is found counts as used at the time of the rebuild. Payloads are verified when read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from storage.base import NamespaceInfo
from storage.lmdb_index import Entry
from storage.lmdb_writer import IndexWriter
from storage.record import BLOCK_BYTES, RECORD_VERSION, decode_header, header_bytes
from storage.slab import slot_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from storage.lmdb_index import Index
    from storage.record import Header
    from storage.slab import SlabFiles

__all__ = ["rebuild_index"]

_SLOTS_A_TRANSACTION = 1024


def rebuild_index(index: Index, slabs: SlabFiles, namespaces: Iterable[NamespaceInfo], now_ns: int) -> int:
    """Fill an empty index; slots without a whole header become holes. Returns the pages found. Raises OSError."""
    with index.env.begin(write=True) as txn:
        writer = IndexWriter(index, txn)
        for info in namespaces:
            writer.add_space(info)
        writer.flush()
    found = 0
    for blocks in slabs.found():
        size = blocks * BLOCK_BYTES
        slots = -(-os.fstat(slabs.fd(blocks)).st_size // size)
        for first in range(0, slots, _SLOTS_A_TRANSACTION):
            found += _adopt(index, slabs, blocks, range(first, min(first + _SLOTS_A_TRANSACTION, slots)), now_ns)
    return found


def _adopt(index: Index, slabs: SlabFiles, blocks: int, slots: range, now_ns: int) -> int:
    adopted = 0
    with index.env.begin(write=True) as txn:
        writer = IndexWriter(index, txn)
        allocated = writer.allocate(blocks, len(slots))
        assert allocated.new == tuple(slots)
        for slot in slots:
            header = _read_header(slabs, blocks, slot)
            if header is None or writer.entry(header.ref.key) is not None:
                slabs.wipe(blocks, slot)
                writer.give_back_hole(blocks, slot)
                continue
            ref = header.ref
            space = index.space(txn, ref.namespace) or writer.add_space(NamespaceInfo(ref.namespace))
            parent_key = b"" if ref.parent_key == ref.namespace else ref.parent_key
            entry = Entry(0, now_ns, blocks, slot, header.payload_bytes, len(ref.tokens), space.number, 0, parent_key)
            writer.insert(ref.key, entry)
            adopted += 1
        writer.flush()
    return adopted


def _read_header(slabs: SlabFiles, blocks: int, slot: int) -> Header | None:
    """Read a slot's header, or None if there is none that fits its slot."""
    data = os.pread(slabs.fd(blocks), BLOCK_BYTES, slot * blocks * BLOCK_BYTES)
    if (size := _claimed_header_bytes(data)) > BLOCK_BYTES:
        data = os.pread(slabs.fd(blocks), min(size, blocks * BLOCK_BYTES), slot * blocks * BLOCK_BYTES)
    header = decode_header(data)
    if header is None or header.version != RECORD_VERSION:
        return None
    ref = header.ref
    return header if slot_blocks(len(ref.key), len(ref.tokens), header.payload_bytes) == blocks else None


def _claimed_header_bytes(data: bytes) -> int:
    key_bytes, token_bytes = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:12], "little")
    return header_bytes(key_bytes, token_bytes)
