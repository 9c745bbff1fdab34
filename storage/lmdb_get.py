"""How records come out of the LMDB store: into the caller's buffers first, then every field and the checksum are compared.

A reader holds no lock. If what it read does not fit, a fresh look at the index tells a race from damage: the entry has changed
if the page was evicted meanwhile, by whichever process; if it has not, nobody wrote to the slot, and the record is bad.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from storage.base import GetOutcome
from storage.lmdb_index import slot_fields
from storage.record import BLOCK_BYTES, RECORD_VERSION, decode_header, frame, padded_bytes, sums_fit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from storage.base import Medium, PageRef
    from storage.lmdb_index import Index
    from storage.slab import SlabFiles

__all__ = ["Doomed", "PageGetter"]

_RUN_BYTES = 384 << 10  # neighbours read in one call: few enough that they are still in the cache when verified


class Doomed(NamedTuple):
    """A bad record, to be deleted unless its entry has changed since."""

    key: bytes
    seq: int


class _Target(NamedTuple):
    """A page that is in the index with the right lengths. at: its place in the batch. framed: its header's beginning."""

    at: int
    ref: PageRef
    payload: memoryview
    seq: int
    blocks: int
    slot: int
    framed: bytes
    header: bytearray


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
        outcomes = [GetOutcome.ABSENT] * len(refs)
        suspects: list[Doomed] = []
        targets: list[_Target] = []
        for at, (ref, payload, raw) in enumerate(zip(refs, into, found, strict=True)):
            if raw is None:
                continue
            seq, blocks, slot, payload_bytes, token_bytes = slot_fields(raw)
            if payload_bytes != payload.nbytes or token_bytes != len(ref.tokens):
                outcomes[at] = GetOutcome.MISMATCH
                suspects.append(Doomed(ref.key, seq))
                continue
            framed = frame(ref, payload_bytes)
            header = bytearray(padded_bytes(len(framed)))
            targets.append(_Target(at, ref, payload, seq, blocks, slot, framed, header))
        for run in _runs(targets):
            for target, outcome in zip(run, self._read_run(run), strict=True):
                outcomes[target.at] = outcome
                if outcome is GetOutcome.CORRUPT or outcome is GetOutcome.MISMATCH:
                    suspects.append(Doomed(target.ref.key, target.seq))
        return outcomes, suspects

    def has_changed(self, suspect: Doomed) -> bool:
        """Tell whether a page was evicted, or stored anew, since its entry was read."""
        with self._index.read() as txn:
            raw = txn.get(suspect.key)
        return raw is None or slot_fields(raw)[0] != suspect.seq

    # helpers

    def _read_run(self, run: Sequence[_Target]) -> list[GetOutcome]:
        """Read neighbouring slots in one call and verify each."""
        size = run[0].blocks * BLOCK_BYTES
        buffers: list[bytearray | memoryview] = []
        for target in run:
            buffers += (target.header, target.payload)
            if gap := size - len(target.header) - target.payload.nbytes:
                buffers.append(bytearray(gap))
        try:
            got = self._slabs.read(run[0].blocks, run[0].slot, buffers)
        except OSError:
            return [GetOutcome.FAILED] * len(run)
        return [self._verify(target, got - at * size) for at, target in enumerate(run)]

    def _verify(self, target: _Target, got: int) -> GetOutcome:
        """Compare a record of which `got` bytes, or more, were read."""
        _, ref, payload, _, _, _, framed, header = target
        wanted = len(header) + payload.nbytes
        if self._medium is not None:
            got = self._medium.after_read(payload, min(got, wanted))
        if got >= wanted and header.startswith(framed) and sums_fit(header, len(framed), framed, payload):
            return GetOutcome.HIT
        return _classify(ref, bytes(header) if got >= len(header) else b"", payload.nbytes)


def _runs(targets: Sequence[_Target]) -> Iterator[Sequence[_Target]]:
    """Split targets into runs of neighbouring slots, of _RUN_BYTES or of one record."""
    start = 0
    while start < len(targets):
        first = targets[start]
        most = start + max(1, _RUN_BYTES // (first.blocks * BLOCK_BYTES))
        end = start + 1
        while end < len(targets) and end < most:
            target = targets[end]
            if target.blocks != first.blocks or target.slot != first.slot + end - start:
                break
            end += 1
        yield targets[start:end]
        start = end


def _classify(ref: PageRef, data: bytes, payload_bytes: int) -> GetOutcome:
    """Tell a whole record of other content (MISMATCH) from a damaged one (CORRUPT)."""
    header = decode_header(data)
    if header is None or header.version != RECORD_VERSION or header.ref.key != ref.key:
        return GetOutcome.CORRUPT
    if header.ref != ref or header.payload_bytes != payload_bytes:
        return GetOutcome.MISMATCH
    return GetOutcome.CORRUPT
