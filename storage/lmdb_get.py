"""How records come out of the LMDB store: into the caller's buffers first, then every field and the checksum are compared.

A reader holds no lock. If what it read does not fit, a fresh look at the index tells a race from damage: the entry has changed
if the page was evicted meanwhile, by whichever process; if it has not, nobody wrote to the slot, and the record is bad.
"""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

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


class _Member(msgspec.Struct, gc=False):
    """A page to be read. at: its place in the caller's batch. seq: of its entry. framed: what its header must begin with."""

    at: int
    ref: PageRef
    payload: memoryview
    seq: int
    framed: bytes


class _Run:
    """Neighbouring slots, of records of one shape, to be read in one call, and what must be found in them.

    shape: blocks of a slot, bytes of a payload and of a frame.
    """

    __slots__ = ("following", "full", "header_bytes", "members", "shape", "slot")

    def __init__(self, shape: tuple[int, int, int], slot: int) -> None:
        self.shape = shape
        self.slot = self.following = slot
        self.full = slot + max(1, _RUN_BYTES // (shape[0] * BLOCK_BYTES))
        self.header_bytes = padded_bytes(shape[2])
        self.members: list[_Member] = []

    def buffers(self, headers: Sequence[bytearray]) -> list[bytearray | memoryview]:
        """Where the run's bytes go: `headers`, which may be too many, payloads, and what fills the slots."""
        out: list[bytearray | memoryview] = []
        blocks, payload_bytes, _ = self.shape
        gap = bytearray(blocks * BLOCK_BYTES - self.header_bytes - payload_bytes)
        for header, member in zip(headers, self.members, strict=False):
            out += (header, member.payload, gap) if gap else (header, member.payload)
        return out


class _Headers:
    """Buffers for the headers of a run, used again by the next. In fresh memory each would cost a page fault."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[bytearray]] = {}

    def take(self, nbytes: int, count: int) -> list[bytearray]:
        """At least `count` buffers, until the next call."""
        buffers = self._by_size.setdefault(nbytes, [])
        buffers += [bytearray(nbytes) for _ in range(count - len(buffers))]
        return buffers


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
        framed = frame(ref, payload_bytes)
        shape = (blocks, payload_bytes, len(framed))
        run = self._open
        if run is None or slot != run.following or slot == run.full or shape != run.shape:
            self.close()
            run = self._open = _Run(shape, slot)
        run.members.append(_Member(at, ref, payload, seq, framed))
        run.following += 1

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
        headers = _Headers()
        with contextlib.suppress(IndexError):  # none left
            while True:
                run = reading.whole.popleft()
                self._read_run(run, headers.take(run.header_bytes, len(run.members)), reading)

    def _read_run(self, run: _Run, headers: Sequence[bytearray], reading: _Reading) -> None:
        """Read neighbouring slots in one call, verify each, and enter what became of it."""
        outcomes, hit, medium = reading.outcomes, GetOutcome.HIT, self._medium
        blocks, payload_bytes, framed_bytes = run.shape
        size, wanted = blocks * BLOCK_BYTES, run.header_bytes + payload_bytes
        try:
            got = self._slabs.read(blocks, run.slot, run.buffers(headers))
        except OSError:
            for member in run.members:
                outcomes[member.at] = GetOutcome.FAILED
            return
        for header, member in zip(headers, run.members, strict=False):
            framed, payload = member.framed, member.payload
            believed = got if medium is None else medium.after_read(payload, min(got, wanted))
            got -= size
            if believed >= wanted and header.startswith(framed) and sums_fit(header, framed_bytes, framed, payload):
                outcomes[member.at] = hit
                continue
            data = bytes(header) if believed >= len(header) else b""
            outcomes[member.at] = _classify(member.ref, data, payload_bytes)
            reading.suspects.append(Doomed(member.ref.key, member.seq))


def _classify(ref: PageRef, data: bytes, payload_bytes: int) -> GetOutcome:
    """Tell a whole record of other content (MISMATCH) from a damaged one (CORRUPT)."""
    header = decode_header(data)
    if header is None or header.version != RECORD_VERSION or header.ref.key != ref.key:
        return GetOutcome.CORRUPT
    if header.ref != ref or header.payload_bytes != payload_bytes:
        return GetOutcome.MISMATCH
    return GetOutcome.CORRUPT
