"""Errors of the page stores.

StoreError
├── StoreUnavailable      the store can't be used now (closed, detached, hung past its deadline)
├── StoreFull             no room, and eviction could not make any (byte cap, free-space floor, ENOSPC, map full)
├── StoreFormatError      the folder holds another format version, or something that is not a store
├── StoreLocationError    the folder can't be used at all (read-only, a network file system, a file in its place)
└── StoreForkError        used in a child process after fork
"""

from __future__ import annotations

__all__ = [
    "StoreError",
    "StoreForkError",
    "StoreFormatError",
    "StoreFull",
    "StoreLocationError",
    "StoreUnavailable",
]


class StoreError(Exception):
    """Any failure of a page store. `kind` is a short stable word used as a metric label."""

    kind = "io"


class StoreUnavailable(StoreError):
    """The store can't be used now: closed, detached, or past its deadline."""

    kind = "unavailable"


class StoreFull(StoreError):
    """There is no room and eviction could not make any."""

    kind = "full"


class StoreFormatError(StoreError):
    """The folder holds another format version, or is not a store."""

    kind = "format"


class StoreLocationError(StoreError):
    """The folder can't hold a store: read-only, a network file system, not a folder."""

    kind = "location"


class StoreForkError(StoreError):
    """A store opened before fork was used in the child."""

    kind = "fork"
