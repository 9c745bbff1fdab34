"""How records come out of the LMDB store: into the caller's buffer first, then every field and the checksum are compared.

A reader holds no lock. If what it read does not fit, a fresh look at the index tells a race from damage: the entry has changed
if the page was evicted meanwhile, by whichever process; if it has not, nobody wrote to the slot, and the record is bad.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from storage.base import GetOutcome
from storage.lmdb_index import decode_entry
from storage.record import RECORD_VERSION, decode_header, frame, header_bytes, sums_fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.base import Medium, PageRef
    from storage.lmdb_index import Entry, Index
    from storage.slab import SlabFiles

__all__ = ["Doomed", "PageGetter"]


class Doomed(NamedTuple):
    """A bad record, to be deleted unless its entry has changed since."""

    key: bytes
    seq: int


class PageGetter:
    """Reads and verifies pages. Any thread, any number at a time."""

    def __init__(self, index: Index, slabs: SlabFiles, medium: Medium | None) -> None:
        self._index = index
        self._slabs = slabs
        self._medium = medium

    def get(self, refs: Sequence[PageRef], into: Sequence[memoryview]) -> tuple[list[GetOutcome], list[Doomed]]:
        """Read pages into buffers; see PageStore.get_many. The index is asked once, for one snapshot. Raises lmdb.Error."""
        with self._index.read() as txn:
            found = [txn.get(ref.key) for ref in refs]
        outcomes: list[GetOutcome] = []
        doomed: list[Doomed] = []
        header = bytearray()
        for ref, view, raw in zip(refs, into, found, strict=True):
            if raw is None:
                outcomes.append(GetOutcome.ABSENT)
                continue
            entry = decode_entry(raw)
            size = header_bytes(len(ref.key), len(ref.tokens))
            if len(header) != size:
                header = bytearray(size)
            outcome = self._read(ref, view, entry, header)
            if outcome in (GetOutcome.CORRUPT, GetOutcome.MISMATCH):
                if self._has_changed(ref.key, entry.seq):
                    outcome = GetOutcome.ABSENT
                else:
                    doomed.append(Doomed(ref.key, entry.seq))
            outcomes.append(outcome)
        return outcomes, doomed

    # helpers

    def _read(self, ref: PageRef, view: memoryview, entry: Entry, header: bytearray) -> GetOutcome:
        if entry.payload_bytes != view.nbytes or entry.token_bytes != len(ref.tokens):
            return GetOutcome.MISMATCH
        try:
            got = self._slabs.read(entry.blocks, entry.slot, header, view)
        except OSError:
            return GetOutcome.FAILED
        if self._medium is not None:
            got = self._medium.after_read(view, got)
        framed = frame(ref, view.nbytes)
        whole = got == len(header) + view.nbytes
        if whole and header.startswith(framed) and sums_fit(header, len(framed), framed, view):
            return GetOutcome.HIT
        return _classify(ref, bytes(header) if got >= len(header) else b"", view.nbytes)

    def _has_changed(self, key: bytes, seq: int) -> bool:
        with self._index.read() as txn:
            raw = txn.get(key)
        return raw is None or decode_entry(raw).seq != seq


def _classify(ref: PageRef, data: bytes, payload_bytes: int) -> GetOutcome:
    """Tell a whole record of other content (MISMATCH) from a damaged one (CORRUPT)."""
    header = decode_header(data)
    if header is None or header.version != RECORD_VERSION or header.ref.key != ref.key:
        return GetOutcome.CORRUPT
    if header.ref != ref or header.payload_bytes != payload_bytes:
        return GetOutcome.MISMATCH
    return GetOutcome.CORRUPT
