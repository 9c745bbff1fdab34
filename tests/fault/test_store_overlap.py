"""A put writes records and enters them into the index at the same time: when one of them fails, nothing remains of either."""

from __future__ import annotations

import errno
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import pytest

from storage.lmdb_writer import IndexWriter
from storage.maintenance import check
from storage.slab import SlabFiles

sys.path.insert(0, str(Path(__file__).parent))
import store_load as load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from storage.lmdb_store import LmdbStore
    from storage.slab import Gather

PAGES = 40


def no_progress(done: int, total: int) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    """A store that holds one conversation."""
    store = load.open_store(tmp_path / "store", capacity=64 << 20)
    assert load.write(store, load.chain(0, 10)) == {"stored": 10}
    yield store
    store.close()
    assert check(tmp_path / "store", no_progress).sound


def fail_last_write(monkeypatch: pytest.MonkeyPatch, code: int, times: int) -> None:
    """Have the last write of a put, the largest, fail once all its pages are entered into the transaction."""
    failed: list[int] = []
    ready = threading.Event()
    write, flush = SlabFiles.write, IndexWriter.flush

    def tell(writer: IndexWriter) -> None:
        flush(writer)
        ready.set()

    def write_until(slabs: SlabFiles, blocks: int, gathers: Sequence[Gather]) -> None:
        write(slabs, blocks, gathers)
        if len(failed) < times and sum(len(gather.buffers) // 3 for gather in gathers) > PAGES // 3:
            assert ready.wait(10)
            failed.append(code)
            raise OSError(code, "injected")

    monkeypatch.setattr(IndexWriter, "flush", tell)
    monkeypatch.setattr(SlabFiles, "write", write_until)


def test_a_write_that_finds_no_room_after_its_entries_were_made_is_tried_again_without_growth(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_last_write(monkeypatch, errno.ENOSPC, 1)
    assert load.write(store, load.chain(3, PAGES)) == {"stored": 10, "no_room": PAGES - 10}
    assert store.stats().errors["enospc"] == 1
    assert store.stats().evicted_pages == 10
    assert load.read(store, load.chain(3, PAGES)) == {"hit": 10, "absent": PAGES - 10}


def test_a_write_that_fails_after_its_entries_were_made_leaves_nothing(
    store: LmdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, bytes_before = store.stats().pages, store.stats().bytes
    fail_last_write(monkeypatch, errno.EIO, 1)
    assert load.write(store, load.chain(3, PAGES)) == {"failed": PAGES}
    assert store.stats().errors["failed"] == PAGES
    assert store.count_prefix([ref.key for ref in load.chain(3, PAGES)]) == 0
    assert (store.stats().pages, store.stats().bytes) == (pages, bytes_before)
    assert load.write(store, load.chain(3, PAGES)) == {"stored": PAGES}
    assert load.read(store, load.chain(3, PAGES)) == {"hit": PAGES}


def test_an_index_that_fails_while_records_are_written_leaves_nothing(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_before = store.stats().bytes
    with monkeypatch.context() as patch:

        def fail(writer: IndexWriter, key: bytes, entry: object) -> None:
            raise lmdb.DiskError("injected")

        patch.setattr(IndexWriter, "insert", fail)
        assert load.write(store, load.chain(3, PAGES)) == {"failed": PAGES}
    assert store.stats().bytes == bytes_before
    assert store.count_prefix([ref.key for ref in load.chain(3, PAGES)]) == 0
    assert load.write(store, load.chain(3, PAGES)) == {"stored": PAGES}


def test_a_map_that_fills_while_records_are_written_is_counted_and_half_is_tried(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert, inserted = IndexWriter.insert, []

    def fill_once(writer: IndexWriter, key: bytes, entry: object) -> None:
        inserted.append(key)
        if len(inserted) == PAGES:
            raise lmdb.MapFullError("injected")
        insert(writer, key, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(IndexWriter, "insert", fill_once)
    outcomes = load.write(store, load.chain(3, PAGES))
    assert outcomes == {"stored": PAGES // 2, "no_room": PAGES // 2}
    assert store.stats().errors["map_full"] == 1
    assert load.read(store, load.chain(3, PAGES // 2)) == {"hit": PAGES // 2}
