"""The page store on disk: LMDB keeps the index, slab files keep the records.

Why not records as LMDB values: measured at 20 times a 256 MiB map, plain values hold their speed with one page size (last
tenth / first: 64 KiB 1.21 / 0.81 GiB/s, 360 KiB 2.24 / 1.62, 2 MiB 2.57 / 3.80), and with mixed sizes too, but then 9,412
transactions of some 9,000 pages ended in map-full at 95 % fill, and at times only 84 % of the map held live pages, because a
value needs neighbouring pages. Slabs have no such limit, read straight into the caller's buffer without the GIL, shrink
when room is needed elsewhere, and neither a damaged payload nor a truncated file can harm the B-tree or raise SIGBUS.

Promises by `sync`, after a kill -9 / after a power cut:
* none: nothing committed is lost / anything may be lost.
* batch: nothing committed is lost / at most the last second is.
* always: nothing committed is lost / nothing committed is lost.

LMDB does not sync its commits but for `always`, so a power cut may leave the B-tree torn. It is walked at the next open, and
built anew from the slabs if it is; every header says what the index knew. Whatever comes back, a page is served only if header
and checksum fit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

import lmdb

from storage.base import GetOutcome, NamespaceStats, PutOutcome, StoreStats
from storage.lmdb_bulk import clear_older, clear_pages, turn_back
from storage.lmdb_folder import MIN_CAPACITY_BYTES, StoreFolder
from storage.lmdb_get import Doomed, PageGetter
from storage.lmdb_index import Index
from storage.lmdb_put import Limits, PagePutter, Pending
from storage.lmdb_session import Session, translated
from storage.lmdb_writer import IndexWriter
from storage.rebuild import rebuild_index
from storage.slab import SlabFiles, slot_blocks
from storage.verify import audit_store, verify_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from storage.base import Medium, NamespaceInfo, PageRecord, PageRef
    from storage.lmdb_folder import OnDamage
    from storage.lmdb_index import Space
    from storage.verify import BadPage, VerifyReport

__all__ = ["LmdbStore", "SyncMode"]

SyncMode = Literal["none", "batch", "always"]

_log = logging.getLogger(__name__)
_KEEP_INTERVAL_S = 1.0
_EARLY_DEATH_S = 60.0
_CHUNK_RECORDS = 256
_INDEX_BYTES_A_RECORD = 4 * 4096  # of a chunk: it may copy a page of entries and one of leaves for each, half of a small index
_CHUNK_BYTES = 32 << 20
_NOT_THERE = (PutOutcome.NO_ROOM, PutOutcome.FAILED)
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError, lmdb.BadTxnError)
_BAD = (GetOutcome.MISMATCH, GetOutcome.CORRUPT, GetOutcome.FAILED)


class LmdbStore:
    """A page store in a folder on local disk; several processes may share the folder. See the module."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        sync: SyncMode = "batch",
        free_floor_bytes: int | None = None,
        quotas: Mapping[str, int] | None = None,
        clock: Callable[[], int] = time.time_ns,
        medium: Medium | None = None,
        on_damage: OnDamage = "set_aside",
    ) -> None:
        """Open or create.

        free_floor_bytes: what must stay free on the file system; by default 1 % of it, at most 1 GiB. quotas: bytes by tenant.
        on_damage: what becomes of an index beyond use: a new one is built from the records, or StoreDamaged is raised.
        Raises StoreLocationError, StoreFormatError, StoreFull, StoreUnavailable, ValueError.
        """
        if capacity_bytes < MIN_CAPACITY_BYTES:
            raise ValueError(f"the store needs at least {MIN_CAPACITY_BYTES} bytes, not {capacity_bytes}")
        if sync not in get_args(SyncMode):
            raise ValueError(f"sync must be one of {', '.join(get_args(SyncMode))}, not {sync}")
        self._sync_mode = sync
        self._clock = clock
        self._errors: Counter[str] = Counter()
        self._touches: dict[bytes, int] = {}
        self._spaces: dict[bytes, Space] = {}
        self._session = Session(self._note_damage)
        self._write_lock = threading.Lock()
        self._stop = threading.Event()
        self._synced_txn = 0
        self._folder = StoreFolder(folder, capacity_bytes, on_damage, synced_index=sync == "always")
        self._slabs = SlabFiles(self._folder.path)
        try:
            with translated():
                self._open(self._limits(free_floor_bytes, quotas), medium)
                self._folder.opened()
        except BaseException:
            if hasattr(self, "_index"):
                self._index.env.close()
            self._slabs.close()
            self._folder.close(clean=False)
            raise
        self._keeper = threading.Thread(target=self._keep, name="store-keeper", daemon=True)
        self._keeper.start()

    @property
    def secret(self) -> bytes:
        return self._folder.secret

    def register_namespace(self, info: NamespaceInfo) -> None:
        """See PageStore. A known namespace keeps the tenant it was first registered with."""
        with self._session, self._write_lock, self._index.env.begin(write=True) as txn:
            if self._index.space(txn, info.digest) is None:
                self._folder.remember_namespace(info)
                self._putter.overhead_bytes = self._folder.overhead_bytes()
            self._spaces[info.digest] = IndexWriter(self._index, txn).add_space(info)

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        with self._session, self._index.read() as txn:
            low, high = 0, len(keys)
            while low < high:
                middle = (low + high) // 2
                if txn.get(keys[middle]) is None:
                    high = middle
                else:
                    low = middle + 1
            return low

    def put_many(self, records: Sequence[PageRecord]) -> list[PutOutcome]:
        with self._session:
            outcomes = [PutOutcome.NO_ROOM] * len(records)

            @cache
            def held() -> set[bytes]:
                return {key for record in records for key in (record.ref.key, record.ref.parent_key)}

            refused: set[bytes] = set()
            for chunk in self._chunks(records):
                put = self._put_chunk(chunk, held, refused)
                for at, outcome in put.items():
                    outcomes[at] = outcome
                if len(put) < len(chunk) or PutOutcome.FAILED in put.values():
                    refused.update(pending.ref.key for pending in chunk if outcomes[pending.at] in _NOT_THERE)
            for outcome in _NOT_THERE:
                if times := outcomes.count(outcome):
                    self._errors[outcome.value] += times
            return outcomes

    def get_many(self, refs: Sequence[PageRef], into: Sequence[memoryview]) -> list[GetOutcome]:
        with self._session:
            outcomes, suspects = self._getter.get(refs, into)
            if outcomes.count(GetOutcome.HIT) == len(refs):
                self._touch(refs)
                return outcomes
            changed = {suspect.key for suspect in suspects if self._getter.has_changed(suspect)}
            if changed:
                outcomes = [GetOutcome.ABSENT if ref.key in changed else o for ref, o in zip(refs, outcomes, strict=True)]
            self._touch([ref for ref, outcome in zip(refs, outcomes, strict=True) if outcome is GetOutcome.HIT])
            for outcome in outcomes:
                if outcome in _BAD:
                    self._count_error(outcome.value)
            self._delete_doomed([suspect for suspect in suspects if suspect.key not in changed])
            return outcomes

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._session, self._write_lock, self._index.env.begin(write=True) as txn:
            writer = IndexWriter(self._index, txn)
            there = [key for key in dict.fromkeys(keys) if writer.entry(key) is not None]
            for key in there:
                writer.remove(key)
            writer.flush()
            return len(there)

    def clear(self, namespace: bytes | None = None) -> int:
        """See PageStore. The blocks go back to the file system, so what was cleared is gone from the disk too."""
        with self._session:
            with self._index.read() as txn:
                space = self._index.space(txn, namespace) if namespace is not None else None
            if namespace is not None and space is None:
                return 0
            cleared = clear_pages(self._index, self._write_lock, space.number if space else None)
            with self._write_lock:
                self._putter.give_back_free_blocks()
            return cleared

    def clear_older(self, before_ns: int) -> int:
        """Delete the pages not used since a Unix time, leaves first; returns how many."""
        with self._session:
            cleared = clear_older(self._index, self._write_lock, before_ns)
            with self._write_lock:
                self._putter.give_back_free_blocks()
            return cleared

    def compact(self) -> None:
        """Give all free blocks back to the file system and shorten the slab files. Safe beside other processes."""
        with self._session, self._write_lock:
            self._putter.give_back_free_blocks()
            self._putter.cut_tails()

    def verify(self, progress: Callable[[int, int], None]) -> VerifyReport:
        """Check structure, accounting and every payload, and delete nothing; `progress` gets (pages done, pages in all)."""
        with self._session:
            return verify_store(self._index, self._slabs, progress)

    def audit(self) -> tuple[str, ...]:
        """Check the index against itself only; the first contradictions found."""
        with self._session:
            return audit_store(self._index)

    def delete_bad(self, bad: Sequence[BadPage]) -> int:
        """Delete pages that `verify` found bad, unless they were stored anew since; returns how many."""
        with self._session:
            return self._delete_doomed([Doomed(page.key, page.seq) for page in bad])

    def sync(self) -> None:
        with self._session:
            self._sync()

    def stats(self) -> StoreStats:
        with self._session, self._index.read() as txn:
            totals = self._index.totals(txn)
            return StoreStats(
                pages=totals.pages,
                bytes=self._slabs.disk_bytes(self._index.slab_counts(txn)) + self._putter.overhead_bytes,
                capacity_bytes=self._folder.capacity_bytes,
                evicted_pages=self._putter.evicted_pages,
                namespaces=tuple(share_of(self._index, txn, space) for space in self._index.all_spaces(txn)),
                errors=dict(self._errors),
            )

    def close(self) -> None:
        """See PageStore. In a process forked since, it does nothing."""
        if not self._session.end():
            return
        self._stop.set()
        self._keeper.join()
        self._getter.close()
        self._putter.close()
        synced = False
        try:
            with translated():
                self._sync()
            synced = True
        finally:
            self._index.env.close()
            self._slabs.close()
            with translated():
                self._folder.close(synced)

    # helpers

    def _limits(self, free_floor_bytes: int | None, quotas: Mapping[str, int] | None) -> Limits:
        if free_floor_bytes is None:
            vfs = os.statvfs(self._folder.path)
            free_floor_bytes = min(1 << 30, vfs.f_blocks * vfs.f_frsize // 100)
        return Limits(self._folder.capacity_bytes, free_floor_bytes, dict(quotas or {}))

    def _open(self, limits: Limits, medium: Medium | None) -> None:
        folder = self._folder
        self._index = Index(folder.index_path, folder.index_bytes, durable_commits=self._sync_mode == "always")
        folder.reserve_index()
        self._index.env.reader_check()
        if folder.fresh_index and self._slabs.found():
            found = rebuild_index(self._index, self._slabs, folder.remembered_namespaces(), self._clock())
            _log.warning("index of %s built anew: %d pages found", folder.path, found)
        durable = self._sync_mode == "always"
        self._putter = PagePutter(self._index, self._slabs, limits, self._clock, self._count_error, durable)
        self._putter.overhead_bytes = folder.overhead_bytes()
        self._getter = PageGetter(self._index, self._slabs, medium)
        if turned := turn_back(self._index, self._write_lock, self._clock()):
            _log.warning("%s: %d pages were last used in the future; they count as used now", folder.path, turned)
        if folder.sole:
            self._putter.tidy(was_clean=folder.was_clean)
            self._putter.shrink()

    def _chunks(self, records: Sequence[PageRecord]) -> Iterator[list[Pending]]:
        """Split a batch into runs of one tenant that go into one transaction."""
        chunk: list[Pending] = []
        size, tenant = 0, ""
        most = min(_CHUNK_RECORDS, self._folder.index_bytes // _INDEX_BYTES_A_RECORD)
        shape, blocks = (0, 0, 0), 0
        for at, record in enumerate(records):
            ref, payload = record.ref, record.payload
            key, _, namespace, tokens = ref
            space = self._spaces.get(namespace)
            if space is None:
                raise ValueError(f"namespace {namespace.hex()} is not registered")
            nbytes = payload.nbytes
            if shape != (own := (len(key), len(tokens), nbytes)):
                shape, blocks = own, slot_blocks(*own)
            full = len(chunk) == most or size + nbytes > _CHUNK_BYTES
            if chunk and (full or space.info.tenant != tenant):
                yield chunk
                chunk, size = [], 0
            chunk.append(Pending(at, ref, space, blocks, payload))
            size, tenant = size + nbytes, space.info.tenant
        if chunk:
            yield chunk

    def _put_chunk(self, chunk: list[Pending], held: Callable[[], set[bytes]], refused: set[bytes]) -> dict[int, PutOutcome]:
        """Put one chunk; what is not in the result has no room."""
        if refused:
            chunk = list(_reachable(chunk, refused))
        if not chunk:
            return {}
        with self._write_lock:
            try:
                return self._putter.put(chunk, held, self._take_touches())
            except (OSError, lmdb.Error) as error:
                self._note_damage(error)
                _log.warning("could not write to %s: %s", self._folder.path, error)
                return dict.fromkeys((record.at for record in chunk), PutOutcome.FAILED)

    def _touch(self, refs: Sequence[PageRef]) -> None:
        """Note the use of the deepest pages; recency passes up to parents when children are evicted."""
        parents = {ref.parent_key for ref in refs}
        now_ns = self._clock()
        for ref in refs:
            if ref.key not in parents:
                self._touches[ref.key] = now_ns

    def _take_touches(self) -> dict[bytes, int]:
        taken, self._touches = self._touches, {}
        return dict(taken)  # a copy: a reader may still add to the old one

    def _flush_touches(self) -> None:
        if not self._touches:
            return
        with self._write_lock, self._index.env.begin(write=True) as txn:
            writer = IndexWriter(self._index, txn)
            for key, used_ns in self._take_touches().items():
                writer.touch(key, used_ns)
            writer.flush()

    def _delete_doomed(self, doomed: Sequence[Doomed]) -> int:
        if not doomed:
            return 0
        deleted = 0
        with self._write_lock, self._index.env.begin(write=True) as txn:
            writer = IndexWriter(self._index, txn)
            for key, seq in doomed:
                entry = writer.entry(key)
                if entry is not None and entry.seq == seq:
                    writer.remove(key)
                    deleted += 1
            writer.flush()
        return deleted

    def _sync(self) -> None:
        """Records first, then the index that points to them."""
        self._flush_touches()
        last_txn = self._index.env.info()["last_txnid"]
        self._slabs.sync()
        if last_txn != self._synced_txn:
            self._index.env.sync(True)
            self._synced_txn = last_txn

    def _keep(self) -> None:
        """Once a second: enter recency, sync, forget readers that died, see what other processes added."""
        born = time.monotonic()
        while not self._stop.wait(_KEEP_INTERVAL_S):
            try:
                if time.monotonic() - born > _EARLY_DEATH_S:
                    self._folder.outlive()
                if self._sync_mode == "none":
                    self._flush_touches()
                else:
                    self._sync()
                self._index.env.reader_check()
                self._putter.overhead_bytes = self._folder.overhead_bytes()
            except (OSError, lmdb.Error) as error:
                self._note_damage(error)
                self._count_error("sync")
                _log.warning("could not sync %s: %s", self._folder.path, error)

    def _note_damage(self, error: BaseException) -> None:
        """Have the index built anew at the next start if LMDB found it damaged."""
        if isinstance(error, _DAMAGE):
            self._count_error("index")
            with contextlib.suppress(OSError):
                self._folder.suspect(f"{type(error).__name__}: {error}")

    def _count_error(self, kind: str) -> None:
        self._errors[kind] += 1


def _reachable(chunk: Sequence[Pending], refused: set[bytes]) -> Iterator[Pending]:
    """Yield the records whose parents are not among `refused`; the others join them there."""
    for pending in chunk:
        if pending.ref.parent_key in refused:
            refused.add(pending.ref.key)
        else:
            yield pending


def share_of(index: Index, txn: lmdb.Transaction, space: Space) -> NamespaceStats:
    """Sum up one namespace in a snapshot."""
    count = index.space_count(txn, space.number)
    oldest_ns, newest_ns = index.leaf_span_ns(txn, space.number)
    return NamespaceStats(space.info, count.pages, count.tokens, count.bytes, oldest_ns / 1e9, newest_ns / 1e9)
