"""Bits flip and files are cut: never a wrong byte, and whatever dies of it, a restart cures."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from storage.errors import StoreFormatError
from storage.identity import load_state, save_state
from storage.maintenance import check, clear, compact, scrub, stat

sys.path.insert(0, str(Path(__file__).parent))
import store_load as load

CHAINS = 12


def no_progress(done: int, total: int) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store with CHAINS conversations of 4 pages."""
    store = load.open_store(tmp_path / "store")
    for number in range(CHAINS):
        assert load.write(store, load.chain(number, 4)) == {"stored": 4}
    store.close()
    return tmp_path / "store"


def flip(path: Path, rng: random.Random, bits: int, size: int | None = None) -> None:
    with path.open("r+b") as file:
        for _ in range(bits):
            at = rng.randrange(size or path.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def read_all(folder: Path) -> dict[str, int]:
    store = load.open_store(folder)
    tally: dict[str, int] = {}
    for number in range(CHAINS):
        for name, count in load.read(store, load.chain(number, 4)).items():
            tally[name] = tally.get(name, 0) + count
    store.close()
    return tally


READ_ALL = (
    "import sys; sys.path.insert(0, sys.argv[1]); import store_load as load; from pathlib import Path\n"
    "store = load.open_store(Path(sys.argv[2]))\n"
    "tallies = [load.read(store, load.chain(number, 4)) for number in range(12)]\n"
    "for number in range(100, 130): load.write(store, load.chain(number, 4))\n"
    "assert not any(tally['wrong'] for tally in tallies), 'wrong bytes'\n"
    "store.close()\n"
)


def use_in_child(folder: Path) -> int:
    """Read and write the store in another process, which may die of a damaged index; returns its exit status."""
    here = Path(__file__).resolve()
    environment = {**os.environ, "PYTHONPATH": str(here.parents[2])}
    command = [sys.executable, "-c", READ_ALL, str(here.parent), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "wrong bytes" not in done.stderr
    return done.returncode


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_in_slabs_are_misses(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    for path in folder.glob("slab-*.bin"):
        flip(path, rng, 6)
    tally = read_all(folder)
    assert 0 < tally["corrupt"] <= 18
    assert tally["corrupt"] + tally["hit"] == CHAINS * 4
    store = load.open_store(folder)
    for number in range(CHAINS):
        assert load.write(store, load.chain(number, 4)).keys() <= {"stored", "present"}
        assert load.read(store, load.chain(number, 4)) == {"hit": 4}
    store.close()


def test_truncated_slabs_are_misses(folder: Path) -> None:
    for path in folder.glob("slab-*.bin"):
        os.truncate(path, path.stat().st_size // 3 * 2)
    tally = read_all(folder)
    assert tally["corrupt"] > 0
    assert tally["hit"] > 0
    assert tally["corrupt"] + tally["hit"] == CHAINS * 4


def test_lost_slabs_are_misses(folder: Path) -> None:
    for path in folder.glob("slab-*.bin"):
        path.unlink()
    assert read_all(folder) == {"corrupt": CHAINS * 4}
    assert check(folder, no_progress).sound


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_in_the_index_are_survived(folder: Path, seed: int) -> None:
    flip(folder / "index.lmdb", random.Random(seed), 1 + 5 * seed, 120_000)
    statuses = [use_in_child(folder) for _ in range(3)]
    assert statuses[-1] == 0, statuses
    assert read_all(folder).keys() <= {"hit", "absent", "corrupt"}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_flipped_bits_in_the_index_are_survived_many_times(folder: Path) -> None:
    for seed in range(int(os.environ.get("STORE_FLIPS", "300"))):
        flip(folder / "index.lmdb", random.Random(seed), 1 + seed % 30, 120_000)
        statuses = [use_in_child(folder) for _ in range(3)]
        assert statuses[-1] == 0, (seed, statuses)


@pytest.mark.parametrize("left", [0, 100, 4096, 10_000, 50_000])
def test_a_truncated_index_is_built_anew(folder: Path, left: int) -> None:
    os.truncate(folder / "index.lmdb", left)
    assert read_all(folder) == {"hit": CHAINS * 4}
    assert stat(folder).pages == CHAINS * 4


def test_a_destroyed_index_is_set_aside_and_built_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "index.lmdb").write_bytes(b"\xff" * 100_000)
    assert read_all(folder) == {"hit": CHAINS * 4}
    assert len(list(folder.glob("index.damaged-*"))) == 1
    assert "set aside" in caplog.text
    assert dict(stat(folder).namespaces[0].info.labels) == {"model": "test"}
    assert check(folder, no_progress).sound


def test_after_a_power_cut_the_index_is_not_trusted(folder: Path) -> None:
    state = load_state(folder)
    assert state is not None
    save_state(folder, replace(state, clean=False))
    assert read_all(folder) == {"hit": CHAINS * 4}
    assert not list(folder.glob("index.damaged-*"))
    save_state(folder, replace(state, clean=False, boot="another boot"))
    assert read_all(folder) == {"hit": CHAINS * 4}
    assert len(list(folder.glob("index.damaged-*"))) == 1
    assert check(folder, no_progress).sound


def test_what_lmdb_met_is_remembered_until_the_next_start(folder: Path) -> None:
    state = load_state(folder)
    assert state is not None
    for left in (replace(state, clean=False, suspect="CorruptedError"), replace(state, clean=False, deaths=2)):
        save_state(folder, left)
        assert read_all(folder) == {"hit": CHAINS * 4}
        (aside,) = folder.glob("index.damaged-*")
        aside.unlink()
    assert read_all(folder) == {"hit": CHAINS * 4}
    assert not list(folder.glob("index.damaged-*"))


def test_one_damaged_identity_is_repaired_and_two_are_refused(folder: Path) -> None:
    whole = (folder / "STORE").read_text()
    (folder / "STORE").write_text(whole[:-3])
    assert read_all(folder) == {"hit": CHAINS * 4}
    assert (folder / "STORE").read_text() == whole
    for name in ("STORE", "STORE.copy"):
        (folder / name).write_text("garbage")
    with pytest.raises(StoreFormatError, match="damaged"):
        load.open_store(folder)


def test_check_finds_and_scrub_repairs_bad_pages(folder: Path) -> None:
    assert check(folder, no_progress).sound
    rng = random.Random(1)
    for path in folder.glob("slab-*.bin"):
        flip(path, rng, 4)
    found = check(folder, no_progress)
    assert found.pages == CHAINS * 4
    assert found.bad
    report = scrub(folder, no_progress)
    assert (report.deleted, report.rebuilt) == (len(found.bad), False)
    assert check(folder, no_progress).sound
    assert read_all(folder)["hit"] == CHAINS * 4 - len(found.bad)


def test_check_reports_and_scrub_replaces_a_damaged_index(folder: Path) -> None:
    (folder / "index.lmdb").write_bytes(b"\xff" * 100_000)
    assert not check(folder, no_progress).sound
    report = scrub(folder, no_progress)
    assert (report.deleted, report.rebuilt) == (0, True)
    assert check(folder, no_progress).sound
    assert read_all(folder) == {"hit": CHAINS * 4}


def test_clear_by_age_keeps_what_was_used(folder: Path) -> None:
    assert clear(folder, older_than_s=3600) == 0
    assert clear(folder, older_than_s=0) == CHAINS * 4
    assert stat(folder).pages == 0


def test_compact_gives_blocks_back(folder: Path) -> None:
    store = load.open_store(folder)
    store.delete([ref.key for number in range(CHAINS // 2, CHAINS) for ref in load.chain(number, 4)])
    store.close()
    before = load.disk_bytes(folder)
    report = compact(folder)
    assert report.bytes_after < report.bytes_before
    assert load.disk_bytes(folder) < before
    assert check(folder, no_progress).sound
    assert read_all(folder)["hit"] == CHAINS // 2 * 4
