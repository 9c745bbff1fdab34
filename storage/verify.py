"""Checks all that a store holds: the index against itself, then every record against the index."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from storage.lmdb_audit import audit_children, audit_index
from storage.lmdb_index import Entry, decode_entry
from storage.record import BLOCK_BYTES, RECORD_VERSION, checksum, decode_header, header_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.lmdb_index import Index
    from storage.slab import SlabFiles

__all__ = ["BadPage", "VerifyReport", "audit_store", "verify_store"]

_PAGES_A_LOOK = 256
_MAX_CONTRADICTIONS = 100


class BadPage(NamedTuple):
    """A page that would not be served, and why. `seq` tells whether it was stored anew since."""

    key: bytes
    seq: int
    reason: str


class VerifyReport(NamedTuple):
    """What a check found. contradictions: of the index with itself, at most 100."""

    pages: int
    bytes: int
    contradictions: tuple[str, ...]
    bad: tuple[BadPage, ...]

    @property
    def sound(self) -> bool:
        return not self.contradictions and not self.bad


def verify_store(index: Index, slabs: SlabFiles, progress: Callable[[int, int], None]) -> VerifyReport:
    """Check everything, beside readers and writers. Raises OSError and lmdb.Error.

    No snapshot is held while payloads are read; a page that went meanwhile is not counted as bad.
    """
    contradictions = audit_store(index)
    with index.read() as txn:
        digests = {space.number: space.info.digest for space in index.all_spaces(txn)}
        total = index.totals(txn).pages
    pages = size = 0
    bad: list[BadPage] = []
    start = b""
    while entries := _entries_from(index, start):
        for key, entry in entries:
            reason = _find_fault(slabs, key, entry, digests.get(entry.space, b""))
            if reason and _is_unchanged(index, key, entry.seq):
                bad.append(BadPage(key, entry.seq, reason))
            pages, size = pages + 1, size + entry.payload_bytes
        progress(pages, max(pages, total))
        start = entries[-1][0] + b"\0"
    return VerifyReport(pages, size, contradictions, tuple(bad))


def audit_store(index: Index) -> tuple[str, ...]:
    """Check an index against itself, in one snapshot; at most 100 contradictions. Raises lmdb.Error."""
    with index.read() as txn:
        return tuple(islice(chain(audit_index(index, txn), audit_children(index, txn)), _MAX_CONTRADICTIONS))


def _entries_from(index: Index, start: bytes) -> list[tuple[bytes, Entry]]:
    with index.read() as txn:
        cursor = txn.cursor(db=index.entries)
        if not (cursor.set_range(start) if start else cursor.first()):
            return []
        return [(bytes(key), decode_entry(raw)) for key, raw in islice(cursor, _PAGES_A_LOOK)]


def _find_fault(slabs: SlabFiles, key: bytes, entry: Entry, namespace: bytes) -> str:
    """Say what is wrong with a record; empty if nothing is."""
    header_data = bytearray(header_bytes(len(key), entry.token_bytes))
    payload = memoryview(bytearray(entry.payload_bytes))
    if len(header_data) + entry.payload_bytes > entry.blocks * BLOCK_BYTES:
        return "does not fit its slot"
    got = slabs.read(entry.blocks, entry.slot, (header_data, payload))
    if got < len(header_data) + entry.payload_bytes:
        return "truncated"
    header = decode_header(bytes(header_data))
    if header is None:
        return "damaged header"
    if header.version != RECORD_VERSION:
        return f"record version {header.version}"
    ref = header.ref
    if (ref.key, ref.parent_key, ref.namespace) != (key, entry.parent_key or namespace, namespace):
        return "another page's record"
    if header.payload_bytes != entry.payload_bytes or len(ref.tokens) != entry.token_bytes:
        return "another length"
    return "" if header.checksum == checksum(payload, header.header_sum) else "wrong checksum"


def _is_unchanged(index: Index, key: bytes, seq: int) -> bool:
    with index.read() as txn:
        raw = txn.get(key)
    return raw is not None and decode_entry(raw).seq == seq
