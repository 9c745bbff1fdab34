"""How records come out of the LMDB store: into the caller's buffers first, then every field and the checksum are compared.

A reader holds no lock. If what it read does not fit, a fresh look at the index tells a race from damage: the entry has changed
if the page was evicted meanwhile, by whichever process; if it has not, nobody wrote to the slot, and the record is bad.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from storage.base import GetOutcome
from storage.helper import Helper
from storage.lmdb_index import slot_fields
from storage.record import BLOCK_BYTES, RECORD_VERSION, decode_header, frame, padded_bytes, sums_fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.base import Medium, PageRef
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

    def add(self, at: int, ref: PageRef, payload: memoryview, seq: int, payload_bytes: int) -> None:
        framed = frame(ref, payload_bytes)
        header_size = padded_bytes(len(framed))
        header = bytearray(header_size)
        buffers = self.buffers
        buffers.append(header)
        buffers.append(payload)
        if gap := self.blocks * BLOCK_BYTES - header_size - payload_bytes:
            buffers.append(bytearray(gap))
        self.members.append((at, ref, payload, seq, framed, header))
        self.following += 1


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
        outcomes = [GetOutcome.ABSENT] * len(refs)
        suspects: list[Doomed] = []
        runs: deque[_Run] = deque()
        for at, (ref, payload, raw) in enumerate(zip(refs, into, found, strict=True)):
            if raw is None:
                continue
            seq, blocks, slot, payload_bytes, token_bytes = slot_fields(raw)
            if payload_bytes != payload.nbytes or token_bytes != len(ref.tokens):
                outcomes[at] = GetOutcome.MISMATCH
                suspects.append(Doomed(ref.key, seq))
                continue
            if not runs or not runs[-1].takes(blocks, slot):
                runs.append(_Run(blocks, slot))
            runs[-1].add(at, ref, payload, seq, payload_bytes)
        self._read_runs(runs, outcomes, suspects)
        return outcomes, suspects

    def has_changed(self, suspect: Doomed) -> bool:
        """Tell whether a page was evicted, or stored anew, since its entry was read."""
        with self._index.read() as txn:
            raw = txn.get(suspect.key)
        return raw is None or slot_fields(raw)[0] != suspect.seq

    # helpers

    def _read_runs(self, runs: deque[_Run], outcomes: list[GetOutcome], suspects: list[Doomed]) -> None:
        """Read runs, two and more in two threads: verifying costs up to a third of what reading costs."""

        def take() -> None:
            with contextlib.suppress(IndexError):  # none left
                while True:
                    self._read_run(runs.popleft(), outcomes, suspects)

        if len(runs) < 2:
            take()
            return
        other = self._helper.begin(take)
        try:
            take()
        finally:
            other.finish()  # the buffers are the caller's again after this

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
