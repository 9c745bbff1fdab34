"""What `hicache store` does to a store folder: look, check, repair, clear, compact.

All of it may run beside a server that has the store open, except where the index itself must be replaced: that is refused with
the reason. Each function opens the store for itself, so it must not be open in the same process.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from storage.errors import StoreFormatError, StoreUnavailable
from storage.identity import load_state
from storage.lmdb_folder import StoreDamaged, StoreFolder
from storage.lmdb_store import LmdbStore
from storage.verify import VerifyReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from storage.base import StoreStats

__all__ = ["CompactReport", "ScrubReport", "check", "clear", "compact", "scrub", "stat"]


class ScrubReport(NamedTuple):
    """What was found, pages deleted, and whether the index was built anew from the records."""

    found: VerifyReport
    deleted: int
    rebuilt: bool


class CompactReport(NamedTuple):
    """Bytes on disk."""

    bytes_before: int
    bytes_after: int


def stat(folder: Path) -> StoreStats:
    """Sum up what the store holds. Raises StoreError; StoreDamaged if its index is beyond use."""
    with _opened(folder) as store:
        return store.stats()


def check(folder: Path, progress: Callable[[int, int], None]) -> VerifyReport:
    """Check structure, accounting and every payload; changes nothing. Raises StoreError."""
    try:
        with _opened(folder) as store:
            return store.verify(progress)
    except StoreDamaged as damage:
        return VerifyReport(0, 0, (str(damage),), ())


def scrub(folder: Path, progress: Callable[[int, int], None]) -> ScrubReport:
    """Repair what `check` finds: delete bad pages; build the index anew if it contradicts itself.

    Raises StoreUnavailable if the index must be built anew while another process has the store open.
    """
    contradictions: tuple[str, ...] = ()
    try:
        with _opened(folder) as store:
            contradictions = store.audit()
    except StoreDamaged as damage:
        contradictions = (str(damage),)
    if contradictions:
        _set_aside(folder, contradictions[0])
    with _opened(folder) as store:
        found = store.verify(progress)
        deleted = store.delete_bad(found.bad)
    found = found._replace(contradictions=contradictions + found.contradictions)
    return ScrubReport(found, deleted, rebuilt=bool(contradictions))


def clear(folder: Path, namespace: bytes | None = None, older_than_s: float | None = None) -> int:
    """Delete the pages of a namespace, those not used for `older_than_s` seconds, or all; returns how many."""
    assert namespace is None or older_than_s is None
    with _opened(folder) as store:
        if older_than_s is not None:
            return store.clear_older(time.time_ns() - int(older_than_s * 1e9))
        return store.clear(namespace)


def compact(folder: Path) -> CompactReport:
    """Give free blocks back to the file system and shorten the slab files."""
    with _opened(folder) as store:
        before = store.stats().bytes
        store.compact()
        return CompactReport(before, store.stats().bytes)


# helpers


@contextmanager
def _opened(folder: Path) -> Iterator[LmdbStore]:
    store = LmdbStore(folder, _capacity(folder), on_damage="refuse")
    try:
        yield store
    finally:
        store.close()


def _capacity(folder: Path) -> int:
    if not (folder / "STORE").exists() and not (folder / "STORE.copy").exists():
        raise StoreFormatError(f"{folder} is not a store")
    state = load_state(folder)
    if state is None:
        raise StoreFormatError(f"{folder} does not say its capacity (STATE is damaged); start a server on it once")
    return state.capacity_bytes


def _set_aside(folder: Path, reason: str) -> None:
    entered = StoreFolder(folder, _capacity(folder), on_damage="keep")
    try:
        if not entered.sole:
            raise StoreUnavailable(f"{folder} is open in another process: its index can't be replaced now; stop that first")
        entered.set_index_aside(reason)
    finally:
        entered.close(clean=False)
