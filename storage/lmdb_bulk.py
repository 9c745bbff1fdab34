"""Changing or deleting many pages, in transactions short enough that others get their turn at the write lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from storage.lmdb_index import decode_entry
from storage.lmdb_writer import IndexWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from storage.lmdb_index import Entry, Index

__all__ = ["clear_older", "clear_pages", "turn_back"]

_PAGES_A_TRANSACTION = 1024
_ENTRIES_A_LOOK = 16_384


def clear_pages(index: Index, lock: AbstractContextManager[object], space: int | None) -> int:
    """Delete the pages of one namespace, or all that were there at the start. Returns how many. Raises lmdb.Error."""
    return _change(index, lock, lambda entry: space is None or entry.space == space, IndexWriter.remove)


def turn_back(index: Index, lock: AbstractContextManager[object], now_ns: int) -> int:
    """Date uses after `now_ns` back to it: a clock was ahead, and its pages would outlive all others until that time has come.

    Only done if leaves say so, since it reads all of the index. Returns how many pages. Raises lmdb.Error.
    """
    with index.read() as txn:
        newest_ns = max((index.leaf_span_ns(txn, space)[1] for space in range(1, index.count_spaces(txn) + 1)), default=0)
    if newest_ns <= now_ns:
        return 0

    def turn(writer: IndexWriter, key: bytes) -> None:
        writer.turn_back(key, now_ns)

    return _change(index, lock, lambda entry: entry.used_ns > now_ns, turn)


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


def _change(
    index: Index,
    lock: AbstractContextManager[object],
    wanted: Callable[[Entry], bool],
    change: Callable[[IndexWriter, bytes], object],
) -> int:
    """Call `change` for every page whose entry is wanted. Returns how many."""
    changed, start = 0, b""
    while True:
        keys, resume = _next_keys(index, wanted, start)
        with lock, index.env.begin(write=True) as txn:
            writer = IndexWriter(index, txn)
            there = [key for key in keys if writer.entry(key) is not None]
            for key in there:
                change(writer, key)
            writer.flush()
        changed += len(there)
        if resume is None:
            return changed
        start = resume


def _next_keys(index: Index, wanted: Callable[[Entry], bool], start: bytes) -> tuple[list[bytes], bytes | None]:
    """Collect keys from `start` on, and where to go on, or None at the end."""
    keys: list[bytes] = []
    with index.read() as txn:
        cursor = txn.cursor(db=index.entries)
        if not (cursor.set_range(start) if start else cursor.first()):
            return keys, None
        for looked, (key, raw) in enumerate(cursor):
            if len(keys) == _PAGES_A_TRANSACTION or looked == _ENTRIES_A_LOOK:
                return keys, bytes(key)
            if wanted(decode_entry(raw)):
                keys.append(bytes(key))
    return keys, None
