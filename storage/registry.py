"""Opens a store by the name of its backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from storage.faulty import FaultPlan, FaultyMedium, FaultyStore
from storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from storage.base import Medium, PageStore
    from storage.lmdb_store import SyncMode

__all__ = ["BACKENDS", "open_store"]

_EXTRA_KEYS = {"faults", "quotas", "free_floor_bytes"}


def open_store(
    backend: str,
    folder: Path,
    capacity_bytes: int,
    sync: str = "batch",
    extra_config: Mapping[str, object] | None = None,
) -> PageStore:
    """Open a store.

    backend: a key of BACKENDS. folder: where it lives (not used by "memory"). sync: none, batch or always.
    extra_config: `quotas` (bytes by tenant), `free_floor_bytes`, `faults` (see FaultPlan.from_config).
    Raises ValueError for what can't be meant, StoreError if it can't be opened.
    """
    extra = dict(extra_config or {})
    if unknown := set(extra) - _EXTRA_KEYS:
        raise ValueError(f"unknown in the store's extra config: {', '.join(sorted(unknown))}")
    if backend not in BACKENDS:
        raise ValueError(f"the storage backend must be one of {', '.join(BACKENDS)}, not {backend}")
    faults = extra.pop("faults", None)
    if faults is None:
        return BACKENDS[backend](folder, capacity_bytes, sync, extra, None)
    if not isinstance(faults, dict):
        raise ValueError("faults must be an object")  # noqa: TRY004 - a bad configuration, not a bad call
    plan = FaultPlan.from_config(faults)
    medium = FaultyMedium(plan)
    return FaultyStore(BACKENDS[backend](folder, capacity_bytes, sync, extra, medium), plan, medium)


def _open_memory(folder: Path, capacity_bytes: int, sync: str, extra: Mapping[str, object], medium: Medium | None) -> PageStore:
    return MemoryStore(capacity_bytes, quotas=_quotas(extra), medium=medium)


def _open_lmdb(folder: Path, capacity_bytes: int, sync: str, extra: Mapping[str, object], medium: Medium | None) -> PageStore:
    from storage.lmdb_store import LmdbStore  # only who uses it loads LMDB

    floor = extra.get("free_floor_bytes")
    if floor is not None and (not isinstance(floor, int) or floor < 0):
        raise ValueError("free_floor_bytes must be a number of bytes")
    return LmdbStore(
        folder,
        capacity_bytes,
        cast("SyncMode", sync),  # the store refuses other words
        free_floor_bytes=floor,
        quotas=_quotas(extra),
        medium=medium,
    )


def _quotas(extra: Mapping[str, object]) -> dict[str, int]:
    quotas = extra.get("quotas", {})
    if not isinstance(quotas, dict) or not all(isinstance(size, int) and size >= 0 for size in quotas.values()):
        raise ValueError("quotas must be an object of bytes by tenant")
    return dict(quotas)


BACKENDS: dict[str, Callable[[Path, int, str, Mapping[str, object], Medium | None], PageStore]] = {
    "lmdb": _open_lmdb,
    "memory": _open_memory,
}
"""Openers by backend name."""
