"""A page store in memory, with the rules of every store: for tests, and as the plainest statement of those rules."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.base import GetOutcome, NamespaceStats, PutOutcome, StoreStats
from storage.errors import StoreUnavailable
from storage.record import checksum, frame, header_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from storage.base import Medium, NamespaceInfo, PageRecord, PageRef

__all__ = ["MemoryStore"]


@dataclass(slots=True)
class _Page:
    """A stored page. `used_ns` is its own last use or that of a child evicted since."""

    ref: PageRef
    payload: bytes
    checksum: int
    used_ns: int

    @property
    def bytes(self) -> int:
        return header_bytes(len(self.ref.key), len(self.ref.tokens)) + len(self.payload)


class MemoryStore:
    """Keeps pages in a dictionary. Nothing survives `close`."""

    def __init__(
        self,
        capacity_bytes: int,
        quotas: Mapping[str, int] | None = None,
        clock: Callable[[], int] = time.time_ns,
        medium: Medium | None = None,
    ) -> None:
        self._medium = medium
        self._capacity = capacity_bytes
        self._quotas = dict(quotas or {})
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._pages: dict[bytes, _Page] = {}
        self._children: Counter[bytes] = Counter()
        self._namespaces: dict[bytes, NamespaceInfo] = {}
        self._errors: Counter[str] = Counter()
        self._evicted = 0
        self._closed = False

    @property
    def secret(self) -> bytes:
        return self._secret

    def register_namespace(self, info: NamespaceInfo) -> None:
        with self._lock:
            self._check_open()
            self._namespaces[info.digest] = info

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._check_open()
            low, high = 0, len(keys)
            while low < high:
                middle = (low + high) // 2
                if keys[middle] in self._pages:
                    low = middle + 1
                else:
                    high = middle
            return low

    def put_many(self, records: Sequence[PageRecord]) -> list[PutOutcome]:
        with self._lock:
            self._check_open()
            for record in records:
                if record.ref.namespace not in self._namespaces:
                    raise ValueError("the record's namespace is not registered")
            refused: set[bytes] = set()
            held = {key for record in records for key in (record.ref.key, record.ref.parent_key)}
            return [self._put(record, held, refused) for record in records]

    def get_many(self, refs: Sequence[PageRef], into: Sequence[memoryview]) -> list[GetOutcome]:
        with self._lock:
            self._check_open()
            return [self._get(ref, view) for ref, view in zip(refs, into, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._check_open()
            return sum(self._remove(key) for key in keys)

    def clear(self, namespace: bytes | None = None) -> int:
        with self._lock:
            self._check_open()
            keys = [key for key, page in self._pages.items() if namespace in (None, page.ref.namespace)]
            return sum(self._remove(key) for key in keys)

    def sync(self) -> None:
        with self._lock:
            self._check_open()

    def stats(self) -> StoreStats:
        with self._lock:
            self._check_open()
            shares = tuple(self._share(info) for info in self._namespaces.values())
            return StoreStats(
                pages=len(self._pages),
                bytes=self._bytes(),
                capacity_bytes=self._capacity,
                evicted_pages=self._evicted,
                namespaces=shares,
                errors=dict(self._errors),
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._pages.clear()

    # helpers; the lock is held

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")

    def _put(self, record: PageRecord, held: set[bytes], refused: set[bytes]) -> PutOutcome:
        ref = record.ref
        if (known := self._pages.get(ref.key)) is not None:
            known.used_ns = self._clock()
            return PutOutcome.PRESENT
        payload = bytes(record.payload)
        page = _Page(ref, payload, checksum(frame(ref, len(payload))) ^ checksum(payload), self._clock())
        if ref.parent_key in refused or not self._make_room(page, held):
            refused.add(ref.key)
            self._errors["no_room"] += 1
            return PutOutcome.NO_ROOM
        self._pages[ref.key] = page
        self._children[ref.parent_key] += 1
        return PutOutcome.STORED

    def _make_room(self, page: _Page, held: set[bytes]) -> bool:
        tenant = self._namespaces[page.ref.namespace].tenant
        quota = self._quotas.get(tenant)
        while quota is not None and self._bytes(tenant) + page.bytes > quota:
            if not self._evict(held, tenant):
                return False
        while self._bytes() + page.bytes > self._capacity:
            if not self._evict(held):
                return False
        return True

    def _evict(self, held: set[bytes], tenant: str | None = None) -> bool:
        leaves = [page for key, page in self._pages.items() if not self._children[key] and key not in held]
        leaves = [page for page in leaves if tenant in (None, self._namespaces[page.ref.namespace].tenant)]
        if not leaves:
            return False
        victim = min(leaves, key=lambda page: page.used_ns)
        self._remove(victim.ref.key)
        if (parent := self._pages.get(victim.ref.parent_key)) is not None:
            parent.used_ns = max(parent.used_ns, victim.used_ns)
        self._evicted += 1
        return True

    def _get(self, ref: PageRef, view: memoryview) -> GetOutcome:
        page = self._pages.get(ref.key)
        if page is None:
            return GetOutcome.ABSENT
        if page.ref != ref or len(page.payload) != view.nbytes:
            return self._reject(ref.key, GetOutcome.MISMATCH)
        view[:] = page.payload
        got = self._medium.after_read(view, view.nbytes) if self._medium is not None else view.nbytes
        if got != view.nbytes or page.checksum != checksum(frame(ref, view.nbytes)) ^ checksum(view):
            return self._reject(ref.key, GetOutcome.CORRUPT)
        page.used_ns = self._clock()
        return GetOutcome.HIT

    def _reject(self, key: bytes, outcome: GetOutcome) -> GetOutcome:
        self._remove(key)
        self._errors[outcome.value] += 1
        return outcome

    def _remove(self, key: bytes) -> int:
        page = self._pages.pop(key, None)
        if page is None:
            return 0
        self._children[page.ref.parent_key] -= 1
        if not self._children[page.ref.parent_key]:
            del self._children[page.ref.parent_key]
        return 1

    def _bytes(self, tenant: str | None = None) -> int:
        pages = self._pages.values()
        return sum(page.bytes for page in pages if tenant in (None, self._namespaces[page.ref.namespace].tenant))

    def _share(self, info: NamespaceInfo) -> NamespaceStats:
        pages = [page for page in self._pages.values() if page.ref.namespace == info.digest]
        uses = [page.used_ns / 1e9 for page in pages]
        return NamespaceStats(
            info=info,
            pages=len(pages),
            tokens=sum(len(page.ref.tokens) // 4 for page in pages),
            bytes=sum(page.bytes for page in pages),
            oldest_use_s=min(uses, default=0.0),
            newest_use_s=max(uses, default=0.0),
        )
