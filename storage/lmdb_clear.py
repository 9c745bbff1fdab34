"""Deleting many pages, in transactions short enough that others get their turn at the write lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from storage.lmdb_index import decode_entry
from storage.lmdb_writer import IndexWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from storage.lmdb_index import Index

__all__ = ["clear_older", "clear_pages"]

_PAGES_A_TRANSACTION = 1024
_ENTRIES_A_LOOK = 16_384


def clear_pages(index: Index, lock: AbstractContextManager[object], space: int | None) -> int:
    """Delete the pages of one namespace, or all that were there at the start. Returns how many. Raises lmdb.Error."""
    cleared, start = 0, b""
    while True:
        keys, resume = _next_keys(index, space, start)
        with lock, index.env.begin(write=True) as txn:
            writer = IndexWriter(index, txn)
            there = [key for key in keys if writer.entry(key) is not None]
            for key in there:
                writer.remove(key)
            writer.flush()
        cleared += len(there)
        if resume is None:
            return cleared
        start = resume


def clear_older(index: Index, lock: AbstractContextManager[object], before_ns: int) -> int:
    """Delete the pages not used since `before_ns`, leaves first. Returns how many. Raises lmdb.Error."""
    cleared = 0
    while True:
        with lock, index.env.begin(write=True) as txn:
            writer = IndexWriter(index, txn)
            everyone = range(1, index.count_spaces(txn) + 1)
            gone = writer.evict(everyone, (), _removed(writer, _PAGES_A_TRANSACTION), before_ns)
            writer.flush()
        cleared += gone
        if gone < _PAGES_A_TRANSACTION:
            return cleared


def _removed(writer: IndexWriter, count: int) -> Callable[[], bool]:
    goal = writer.pages - count
    return lambda: writer.pages <= goal


def _next_keys(index: Index, space: int | None, start: bytes) -> tuple[list[bytes], bytes | None]:
    """Collect keys from `start` on, and where to go on, or None at the end."""
    keys: list[bytes] = []
    with index.read() as txn:
        cursor = txn.cursor(db=index.entries)
        if not (cursor.set_range(start) if start else cursor.first()):
            return keys, None
        for looked, (key, raw) in enumerate(cursor):
            if len(keys) == _PAGES_A_TRANSACTION or looked == _ENTRIES_A_LOOK:
                return keys, bytes(key)
            if space is None or decode_entry(raw).space == space:
                keys.append(bytes(key))
    return keys, None
