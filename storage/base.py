"""What every page store offers: records in, verified bytes out.

A store knows bytes only. It does not know the tree, the tiers or torch. All methods may be called from any thread of the
process that opened the store.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "GetOutcome",
    "Medium",
    "NamespaceInfo",
    "NamespaceStats",
    "PageRecord",
    "PageRef",
    "PageStore",
    "PutOutcome",
    "StoreStats",
]


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """Describes a namespace to people: everything but tokens that must match, in readable form.

    digest: the namespace's root key, which is the parent key of every first page (16 or 32 bytes).
    labels: readable facts, such as model, dtype, page_size. Never secrets or prompt text.
    tenant: the name quotas are kept by (derived from the cache salt, never the salt itself); "" is the default tenant.
    """

    digest: bytes
    labels: Mapping[str, str] = field(default_factory=dict)
    tenant: str = ""


class PageRef(NamedTuple):
    """What a reader knows of a page, and what the record must agree with."""

    key: bytes
    parent_key: bytes
    namespace: bytes
    tokens: bytes  # int32 little-endian, page_size of them


class PageRecord(msgspec.Struct, frozen=True, gc=False):
    """One page to be written. `payload` is borrowed: it must not change until `put_many` returns."""

    ref: PageRef
    payload: memoryview


class PutOutcome(enum.Enum):
    """What became of one record given to `put_many`."""

    STORED = "stored"
    PRESENT = "present"  # a good record with this key was there already; its recency was refreshed
    NO_ROOM = "no_room"  # byte cap, quota, free-space floor, ENOSPC or map full; nothing was written
    FAILED = "failed"  # an I/O error; nothing is visible under this key


class GetOutcome(enum.Enum):
    """What became of one page asked of `get_many`. Only HIT wrote bytes that may be used."""

    HIT = "hit"
    ABSENT = "absent"  # never there, evicted, or evicted while being read
    MISMATCH = "mismatch"  # namespace, parent key, tokens or length differ from what was asked; deleted
    CORRUPT = "corrupt"  # bad checksum, truncated, or another record version; deleted
    FAILED = "failed"  # an I/O error; the record is left alone


class NamespaceStats(NamedTuple):
    """One namespace's share of a store."""

    info: NamespaceInfo
    pages: int
    tokens: int
    bytes: int
    oldest_use_s: float  # Unix time of the least recently used record
    newest_use_s: float


class StoreStats(NamedTuple):
    """Totals of a store. `errors` counts by kind since open."""

    pages: int
    bytes: int  # bytes on disk, all overhead included
    capacity_bytes: int
    evicted_pages: int  # since open
    namespaces: tuple[NamespaceStats, ...]
    errors: Mapping[str, int]


class Medium(Protocol):
    """Stands between a store's medium and its verification, to damage what is read: for fault injection only."""

    def after_read(self, payload: memoryview, got_bytes: int) -> int:
        """Look at, and perhaps damage, a payload just read; returns the bytes the store shall believe it read."""
        ...


@runtime_checkable
class PageStore(Protocol):
    """Keeps pages by key, verifies them on the way out, and evicts leaves first in LRU order under a hard byte cap.

    Does not change: a record's bytes once stored. A key is visible only after its record is complete.
    Since a parent is never evicted before its children, what is stored is prefix-closed except for records that were
    deleted because they were bad; `count_prefix` relies on it and reading verifies it.
    """

    @property
    def secret(self) -> bytes:
        """32 random bytes made when the store was created; seeds the key chain."""
        ...

    def register_namespace(self, info: NamespaceInfo) -> None:
        """Make a namespace known by name. Idempotent; records of an unregistered namespace are refused with ValueError."""
        ...

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """Count the leading keys that are present, by bisection (O(log n) look-ups). Raises StoreError."""
        ...

    def put_many(self, records: Sequence[PageRecord]) -> list[PutOutcome]:
        """Write records, parents before children, in one transaction where possible. Returns when they are visible.

        One outcome a record. Raises StoreError only if the store as a whole can't be used.
        """
        ...

    def get_many(self, refs: Sequence[PageRef], into: Sequence[memoryview]) -> list[GetOutcome]:
        """Read pages into writable buffers of exactly the payload's length; verify all. One outcome a page.

        Buffers whose outcome is not HIT hold garbage. Refreshes recency of hits. Raises StoreError as `put_many`.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete records; returns how many were there."""
        ...

    def clear(self, namespace: bytes | None = None) -> int:
        """Delete all records, or those of one namespace; returns how many."""
        ...

    def sync(self) -> None:
        """Make all that is visible durable."""
        ...

    def stats(self) -> StoreStats:
        """Totals, consistent with each other."""
        ...

    def close(self) -> None:
        """Finish what was begun, sync, release. Idempotent; later calls raise StoreUnavailable.

        Raises StoreError if it could not end clean (a full disk, a folder that is gone); everything is released all the same.
        """
        ...
