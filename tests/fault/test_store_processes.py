"""Two processes on one folder, a fork, and folders where no store can be."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from storage.base import NamespaceInfo
from storage.errors import StoreError, StoreForkError, StoreFormatError, StoreLocationError, StoreUnavailable
from storage.identity import load_identity
from storage.lmdb_store import LmdbStore
from storage.location import file_system_type
from storage.maintenance import check, compact, scrub, stat

sys.path.insert(0, str(Path(__file__).parent))
import store_load as load


def no_progress(done: int, total: int) -> None:
    """Progress that nobody watches."""


def test_two_processes_share_pages_and_one_cap(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    other = load.start_load(folder, 1)
    mine = load.open_store(folder)
    until = time.monotonic() + 3
    number, tally = 0, load.read(mine, load.chain(0, 1))
    sizes: list[int] = []
    while time.monotonic() < until:
        tally += load.write(mine, load.chain(1000 + number % 50, 5))
        tally += load.read(mine, load.chain(number % 200, 5))
        sizes.append(bytes_at_one_moment(mine, folder))
        number += 1
    seen_beside = stat_in_child(folder)
    other.send_signal(signal.SIGTERM)
    said, _ = other.communicate()
    assert other.returncode == 0, said
    assert seen_beside > 0
    assert max(sizes) <= load.CAPACITY
    assert "wrong" not in said
    assert tally["wrong"] == tally["corrupt"] == tally["mismatch"] == tally["failed"] == 0
    assert tally["hit"] > 0
    assert tally["stored"] > 0
    mine.close()
    assert check(folder, no_progress).sound


def bytes_at_one_moment(store: LmdbStore, folder: Path) -> int:
    """Bytes on disk while nobody can write: files are looked at one after the other, and room moves between them."""
    with store._write_lock, store._index.env.begin(write=True):
        return load.disk_bytes(folder)


def stat_in_child(folder: Path) -> int:
    """Pages as `hicache store stat` sees them beside the running processes."""
    import json
    import subprocess

    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", "from engine.cli.store import app; app()", "stat", str(folder), "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages: int = json.loads(done.stdout)["pages"]
    return pages


def test_pages_written_by_one_process_hit_in_the_other(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    mine = load.open_store(folder)
    load.write(mine, load.chain(1000, 5))
    other = load.start_load(folder, 2, capacity=load.CAPACITY * 2)
    time.sleep(0.5)
    other.send_signal(signal.SIGTERM)
    said, _ = other.communicate()
    assert other.returncode == 0
    assert "stored=" in said
    assert any(load.read(mine, load.chain(number, 1)) == {"hit": 1} for number in range(200))
    assert load.read(mine, load.chain(1000, 5)).keys() <= {"hit", "absent"}
    assert mine.stats().capacity_bytes == load.CAPACITY
    mine.close()


def test_two_processes_at_once_build_one_index(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = load.open_store(folder)
    for number in range(1000, 1030):
        load.write(store, load.chain(number, 4))
    pages = store.stats().pages
    store.close()
    (folder / "index.lmdb").unlink()
    opening = [load.begin_load(folder, seed) for seed in (1, 2)]
    for process in opening:
        load.await_load(process)
        process.kill()
        process.communicate()
    assert check(folder, no_progress).sound
    assert stat(folder).pages >= pages // 2


def test_an_index_whose_building_was_cut_short_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "store"
    store = load.open_store(folder)
    for number in range(20):
        load.write(store, load.chain(number, 4))
    store.close()
    (folder / "index.lmdb").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("storage.lmdb_store.rebuild_index", _fail)
        with pytest.raises(StoreError, match="cut short"):
            load.open_store(folder)
    store = load.open_store(folder)
    assert store.stats().pages == 80
    store.close()
    assert check(folder, no_progress).sound


def _fail(*arguments: object) -> int:
    raise OSError("cut short")


def test_maintenance_runs_beside_a_server(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    other = load.start_load(folder, 3)
    time.sleep(0.3)
    assert stat(folder).pages > 0
    assert check(folder, no_progress).sound
    assert not scrub(folder, no_progress).rebuilt
    compact(folder)
    other.send_signal(signal.SIGTERM)
    said, _ = other.communicate()
    assert other.returncode == 0, said
    assert check(folder, no_progress).sound


def test_a_second_open_in_one_process_is_refused(tmp_path: Path) -> None:
    store = load.open_store(tmp_path / "store")
    with pytest.raises(StoreUnavailable, match="open in this process"):
        load.open_store(tmp_path / "store")
    store.close()
    load.open_store(tmp_path / "store").close()


def test_use_after_fork_is_refused(tmp_path: Path) -> None:
    store = load.open_store(tmp_path / "store")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.close()
            store.count_prefix([])
        except StoreForkError:
            os.write(writer, b"refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"refused"
    os.close(reader)
    os.close(writer)
    assert load.write(store, load.chain(0, 2)) == {"stored": 2}
    store.close()


def test_another_format_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    monkeypatch.setattr("storage.identity.FORMAT_VERSION", 999)
    load_identity(folder)
    monkeypatch.undo()
    with pytest.raises(StoreFormatError, match="format 999"):
        load.open_store(folder)


def test_what_is_not_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreFormatError, match=r"thesis\.txt"):
        load.open_store(tmp_path)
    with pytest.raises(StoreLocationError, match="not a folder"):
        load.open_store(tmp_path / "thesis.txt")
    with pytest.raises(StoreFormatError, match="not a store"):
        stat(tmp_path / "nothing")


def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    import subprocess

    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("can't mount a read-only tmpfs")
    try:
        with pytest.raises(StoreLocationError, match="Read-only"):
            load.open_store(mount)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize(
    ("path", "kind"), [("/home/me", "ext4"), ("/data/kv", "nfs4"), ("/data2", "ext4"), ("/with space/x", "xfs")]
)
def test_the_file_system_of_a_path_is_found(path: str, kind: str) -> None:
    mountinfo = (
        "20 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        "30 20 0:40 / /data rw - nfs4 server:/export rw\n"
        "31 20 8:2 / /with\\040space rw - xfs /dev/sdb1 rw\n"
    )
    assert file_system_type(Path(path), mountinfo) == kind


@pytest.mark.parametrize(("capacity", "sync"), [(1 << 20, "batch"), (load.CAPACITY, "sometimes")])
def test_senseless_settings_are_refused(tmp_path: Path, capacity: int, sync: str) -> None:
    with pytest.raises(ValueError, match=r"at least|one of"):
        LmdbStore(tmp_path / "store", capacity, sync=sync)  # type: ignore[arg-type]


def test_the_first_tenant_of_a_namespace_stays(tmp_path: Path) -> None:
    store = load.open_store(tmp_path / "store")
    store.register_namespace(NamespaceInfo(load.NAMESPACE, {"model": "renamed"}, tenant="other"))
    (share,) = store.stats().namespaces
    assert (share.info.tenant, dict(share.info.labels)) == ("", {"model": "renamed"})
    store.close()
