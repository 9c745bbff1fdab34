"""How records come out of the LMDB store: into the caller's buffers first, then every field and the checksum are compared.

A reader holds no lock. If what it read does not fit, a fresh look at the index tells a race from damage: the entry has changed
if the page was evicted meanwhile, by whichever process; if it has not, nobody wrote to the slot, and the record is bad.
"""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from storage.base import GetOutcome
from storage.helper import Helper
from storage.lmdb_index import slot_fields
from storage.record import BLOCK_BYTES, RECORD_VERSION, decode_header, frame, padded_bytes, sums_fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.base import Medium, PageRef
    from storage.helper import Begun
    from storage.lmdb_index import Index
    from storage.slab import SlabFiles

__all__ = ["Doomed", "PageGetter"]

_RUN_BYTES = 384 << 10  # neighbours read in one call: few enough that they are still in the cache when verified


class Doomed(NamedTuple):
    """A bad record, to be deleted unless its entry has changed since."""

    key: bytes
    seq: int


class _Run:
    """Neighbouring slots to be read in one call, and what must be found in them."""

    __slots__ = ("blocks", "buffers", "following", "full", "members", "slot")

    def __init__(self, blocks: int, slot: int) -> None:
        self.blocks = blocks
        self.slot = self.following = slot
        self.full = slot + max(1, _RUN_BYTES // (blocks * BLOCK_BYTES))
        self.buffers: list[bytearray | memoryview] = []
        self.members: list[tuple[int, PageRef, memoryview, int, bytes, bytearray]] = []

    def takes(self, blocks: int, slot: int) -> bool:
        """Tell whether a slot comes next and there is room for it."""
        return slot == self.following and blocks == self.blocks and slot < self.full

    def add(self, at: int, ref: PageRef, payload: memoryview, seq: int) -> None:
        framed = frame(ref, payload.nbytes)
        header = bytearray(padded_bytes(len(framed)))
        self.buffers += (header, payload)
        if gap := self.blocks * BLOCK_BYTES - len(header) - payload.nbytes:
            self.buffers.append(bytearray(gap))
        self.members.append((at, ref, payload, seq, framed, header))
        self.following += 1


class _Reading:
    """One call's runs, filled by the caller's thread and emptied by two, and what became of its pages."""

    def __init__(self, pages: int) -> None:
        self.outcomes = [GetOutcome.ABSENT] * pages
        self.suspects: list[Doomed] = []
        self.whole: deque[_Run] = deque()  # runs that nothing will be added to
        self._open: _Run | None = None

    def add(self, at: int, ref: PageRef, payload: memoryview, raw: bytes | memoryview) -> None:
        """Plan to read the page that the caller gave at place `at` from where its entry says."""
        seq, blocks, slot, payload_bytes, token_bytes = slot_fields(raw)
        if payload_bytes != payload.nbytes or token_bytes != len(ref.tokens):
            self.outcomes[at] = GetOutcome.MISMATCH
            self.suspects.append(Doomed(ref.key, seq))
            return
        run = self._open
        if run is None or not run.takes(blocks, slot):
            self.close()
            run = self._open = _Run(blocks, slot)
        run.add(at, ref, payload, seq)

    def close(self) -> None:
        """Let the last run be read as it is."""
        if self._open is not None:
            self.whole.append(self._open)
        self._open = None


class PageGetter:
    """Reads and verifies pages. Any thread, any number at a time."""

    def __init__(self, index: Index, slabs: SlabFiles, medium: Medium | None) -> None:
        self._index = index
        self._slabs = slabs
        self._medium = medium
        self._helper = Helper("store-read")

    def close(self) -> None:
        """End the helper thread."""
        self._helper.close()

    def get(self, refs: Sequence[PageRef], into: Sequence[memoryview]) -> tuple[list[GetOutcome], list[Doomed]]:
        """Read pages into buffers; see PageStore.get_many. The index is asked once, for one snapshot. Raises lmdb.Error."""
        with self._index.read() as txn:
            found = [txn.get(ref.key) for ref in refs]
        reading = _Reading(len(refs))
        half = len(refs) // 2
        other: Begun[None] | None = None
        try:
            for at, (ref, payload, raw) in enumerate(zip(refs, into, found, strict=True)):
                if at == half and reading.whole:
                    other = self._helper.begin(partial(self._read_runs, reading))
                if raw is not None:
                    reading.add(at, ref, payload, raw)
            reading.close()
            self._read_runs(reading)
        finally:
            if other is not None:
                other.finish()  # the buffers are the caller's again after this
        return reading.outcomes, reading.suspects

    def has_changed(self, suspect: Doomed) -> bool:
        """Tell whether a page was evicted, or stored anew, since its entry was read."""
        with self._index.read() as txn:
            raw = txn.get(suspect.key)
        return raw is None or slot_fields(raw)[0] != suspect.seq

    # helpers

    def _read_runs(self, reading: _Reading) -> None:
        """Read runs until none is left. Two threads do this: verifying costs up to a third of what reading costs."""
        with contextlib.suppress(IndexError):  # none left
            while True:
                self._read_run(reading.whole.popleft(), reading.outcomes, reading.suspects)

    def _read_run(self, run: _Run, outcomes: list[GetOutcome], suspects: list[Doomed]) -> None:
        """Read neighbouring slots in one call, verify each, and enter what became of it."""
        size = run.blocks * BLOCK_BYTES
        try:
            got = self._slabs.read(run.blocks, run.slot, run.buffers)
        except OSError:
            for member in run.members:
                outcomes[member[0]] = GetOutcome.FAILED
            return
        for at, ref, payload, seq, framed, header in run.members:
            wanted = len(header) + payload.nbytes
            believed = got if self._medium is None else self._medium.after_read(payload, min(got, wanted))
            got -= size
            if believed >= wanted and header.startswith(framed) and sums_fit(header, len(framed), framed, payload):
                outcomes[at] = GetOutcome.HIT
                continue
            outcomes[at] = _classify(ref, bytes(header) if believed >= len(header) else b"", payload.nbytes)
            suspects.append(Doomed(ref.key, seq))


def _classify(ref: PageRef, data: bytes, payload_bytes: int) -> GetOutcome:
    """Tell a whole record of other content (MISMATCH) from a damaged one (CORRUPT)."""
    header = decode_header(data)
    if header is None or header.version != RECORD_VERSION or header.ref.key != ref.key:
        return GetOutcome.CORRUPT
    if header.ref != ref or header.payload_bytes != payload_bytes:
        return GetOutcome.MISMATCH
    return GetOutcome.CORRUPT
