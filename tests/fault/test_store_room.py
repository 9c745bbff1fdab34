"""Room runs out: on a small file system, under churn, below the floor."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from storage.base import PageRecord, PageRef, PutOutcome
from storage.errors import StoreError
from storage.maintenance import check

sys.path.insert(0, str(Path(__file__).parent))
import store_load as load

if TYPE_CHECKING:
    from collections.abc import Iterator


def no_progress(done: int, total: int) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"can't mount a tmpfs: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(path: Path) -> None:
    """Write a file until the file system is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def test_a_full_disk_is_counted_survived_and_recovered_from(small_disk: Path) -> None:
    store = load.open_store(small_disk / "store", capacity=256 << 20, floor=-(1 << 30))  # as if more were free than is
    outcomes: Counter[str] = Counter()
    for number in range(0, 400, 3):
        outcomes += load.write(store, load.chain(number, 30))
    assert outcomes["stored"] > 1000
    assert outcomes.keys() <= {"stored", "no_room"}
    errors = store.stats().errors
    assert errors["enospc"] > 0
    assert load.read(store, load.chain(399, 30)) == {"hit": 30}
    ballast = small_disk / "ballast"
    fill(ballast)
    assert load.write(store, load.chain(200, 10)).keys() <= {"stored", "no_room"}
    ballast.unlink()
    assert load.write(store, load.chain(600, 10)) == {"stored": 10}
    assert load.read(store, load.chain(600, 10)) == {"hit": 10}
    store.close()
    assert check(small_disk / "store", no_progress).sound


def test_a_disk_filled_by_others_leaves_what_is_stored(small_disk: Path) -> None:
    store = load.open_store(small_disk / "store", capacity=32 << 20)
    assert load.write(store, load.chain(0, 10)) == {"stored": 10}
    fill(small_disk / "ballast")
    assert load.read(store, load.chain(0, 10)) == {"hit": 10}
    large = load.write(store, load.chain(2, 40))
    assert large.keys() <= {"stored", "no_room"}
    assert large["no_room"] > 0
    store.sync()
    (small_disk / "ballast").unlink()
    assert load.write(store, load.chain(2, 40)).keys() <= {"stored", "present"}
    store.close()
    assert check(small_disk / "store", no_progress).sound


def test_nothing_is_written_below_the_floor(small_disk: Path) -> None:
    store = load.open_store(small_disk / "store", capacity=256 << 20, floor=40 << 20)
    outcomes: Counter[str] = Counter()
    for number in range(0, 90, 3):
        outcomes += load.write(store, load.chain(number, 30))
    assert outcomes["stored"] > 500
    disk = os.statvfs(small_disk)
    assert disk.f_bavail * disk.f_frsize >= 40 << 20
    (small_disk / "ballast").write_bytes(bytes(8 << 20))
    assert load.write(store, load.chain(300, 3)) == {"no_room": 3}
    assert store.stats().errors["floor"] > 0
    store.close()


def test_the_cap_holds_on_disk_at_every_moment_of_a_churn(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = load.open_store(folder)
    written = number = 0
    while written < 20 * load.CAPACITY:
        refs = load.chain(number, 10)
        assert load.write(store, refs) == {"stored": 10}
        assert load.disk_bytes(folder) <= load.CAPACITY
        assert store.stats().bytes <= load.CAPACITY
        written += sum(len(load.payload_of(ref)) for ref in refs)
        number += 1
    assert load.read(store, load.chain(number - 1, 10)) == {"hit": 10}
    stats = store.stats()
    assert stats.bytes > load.CAPACITY // 2
    assert stats.errors == {}
    store.close()
    assert check(folder, no_progress).sound


def tiny_pages(count: int) -> list[PageRecord]:
    """One conversation of pages of one byte."""
    refs, parent = [], load.NAMESPACE
    for at in range(count):
        key = b"tiny" + at.to_bytes(12, "little")
        refs.append(PageRef(key, parent, load.NAMESPACE, key))
        parent = key
    return [PageRecord(ref, memoryview(b"x")) for ref in refs]


def test_a_store_of_tiny_pages_is_full_when_its_index_is(tmp_path: Path) -> None:
    store = load.open_store(tmp_path / "store", capacity=256 << 20)
    records = tiny_pages(12_000)
    for at in range(0, 12_000, 500):
        batch = [
            PageRecord(record.ref._replace(parent_key=load.NAMESPACE), record.payload) for record in records[at : at + 500]
        ]
        assert set(store.put_many(batch)) == {PutOutcome.STORED}
    stats = store.stats()
    assert 5000 < stats.pages < 12_000
    assert stats.errors == {}
    store.close()


def test_a_full_map_is_counted_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.lmdb_put._INDEX_BYTES_A_PAGE", 1)  # as if entries took no room in the index
    store = load.open_store(tmp_path / "store", capacity=256 << 20)
    outcomes: Counter[PutOutcome] = Counter()
    records = tiny_pages(20_000)
    at = 0
    while not outcomes[PutOutcome.NO_ROOM]:
        outcomes.update(store.put_many(records[at : at + 500]))
        at += 500
    assert outcomes[PutOutcome.STORED] > 5000
    assert outcomes.keys() == {PutOutcome.STORED, PutOutcome.NO_ROOM}
    assert store.stats().errors["map_full"] > 0
    kept = [record.ref.key for record in records[:5000]]
    assert store.count_prefix(kept) == 5000
    assert store.clear() == outcomes[PutOutcome.STORED]
    assert load.write(store, load.chain(1, 5)) == {"stored": 5}
    store.close()
    assert check(tmp_path / "store", no_progress).sound


def test_a_smaller_capacity_shrinks_the_store_at_open(tmp_path: Path) -> None:
    store = load.open_store(tmp_path / "store", capacity=32 << 20)
    for number in range(40):
        load.write(store, load.chain(number, 10))
    store.close()
    store = load.open_store(tmp_path / "store", capacity=12 << 20)
    assert load.disk_bytes(tmp_path / "store") <= 12 << 20
    assert load.read(store, load.chain(39, 10))["hit"] > 0
    store.close()
    assert check(tmp_path / "store", no_progress).sound


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    store = load.open_store(tmp_path / "store")
    for number in range(4):
        load.write(store, load.chain(3 * number, 10))
    assert load.read(store, load.chain(0, 10)) == {"hit": 10}
    store.close()
    store = load.open_store(tmp_path / "store")
    number = 100
    while store.stats().evicted_pages < 20:
        load.write(store, load.chain(3 * number, 10))
        number += 1
    assert store.count_prefix([ref.key for ref in load.chain(0, 10)]) == 10
    assert store.count_prefix([ref.key for ref in load.chain(3, 10)]) < 10
    store.close()


def test_pages_used_by_a_clock_that_was_ahead_age_from_the_next_open_on(tmp_path: Path) -> None:
    year_ns = 365 * 86_400 * 10**9
    store = load.open_store(tmp_path / "store", clock=lambda: time.time_ns() + year_ns)
    number = 0
    while store.stats().evicted_pages == 0:
        load.write(store, load.chain(number, 10))
        number += 3
    store.close()
    store = load.open_store(tmp_path / "store")
    for fresh in range(number, 3 * number, 3):
        assert load.write(store, load.chain(fresh, 10)) == {"stored": 10}
        assert load.read(store, load.chain(fresh, 10)) == {"hit": 10}
    old = [load.chain(each, 10) for each in range(0, number, 3)]
    assert [store.count_prefix([ref.key for ref in chain]) for chain in old] == [0] * len(old)
    assert store.stats().namespaces[0].newest_use_s <= time.time()
    store.close()
    assert check(tmp_path / "store", no_progress).sound


def test_a_store_whose_folder_is_gone_says_so_when_it_is_closed_and_holds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = load.open_store(folder)
    load.write(store, load.chain(1, 10))
    shutil.rmtree(folder)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match="No such file"):
        store.close()
    assert len(before) > len(os.listdir("/proc/self/fd"))
    store.close()
    again = load.open_store(folder)
    assert load.write(again, load.chain(1, 10)) == {"stored": 10}
    again.close()
