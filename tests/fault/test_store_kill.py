"""kill -9 at any moment: the store opens again, no byte is wrong, none is lost to the cap."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import store_load as load

from storage.maintenance import check


def no_progress(done: int, total: int) -> None:
    """Progress that nobody watches."""


def kill_and_reopen(folder: Path, seed: int, processes: int, delay_s: float) -> None:
    """Kill writers, then check everything: records, structure, accounting, bytes on disk, and that writing goes on."""
    running = [load.start_load(folder, seed * 10 + at) for at in range(processes)]
    time.sleep(delay_s)
    for process in running:
        process.kill()
    for process in running:
        process.communicate()
        assert process.returncode == -9
    report = check(folder, no_progress)
    assert report.sound, report
    assert load.disk_bytes(folder) <= load.CAPACITY
    assert not list(folder.glob("index.damaged-*"))


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_is_wrong_after_kills_at_random_moments(tmp_path: Path, processes: int) -> None:
    rng = random.Random(processes)
    for number in range(10):
        kill_and_reopen(tmp_path / "store", number, processes, rng.uniform(0.0, 0.3))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_nothing_is_wrong_after_a_thousand_kills(tmp_path: Path) -> None:
    rng = random.Random(0)
    for number in range(1000):
        kill_and_reopen(tmp_path / "store", number, 1 + number % 2, rng.uniform(0.0, 0.5))


def test_what_a_put_returned_is_there_after_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import store_load as load; from pathlib import Path\n"
        "store = load.open_store(Path(sys.argv[2]))\n"
        "for number in range(5): load.write(store, load.chain(number, 6))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    here = Path(__file__).resolve()
    import os
    import subprocess

    command = [sys.executable, "-c", code, str(here.parent), str(tmp_path / "store")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(here.parents[2])}, check=False)
    assert done.returncode == -9
    store = load.open_store(tmp_path / "store")
    for number in range(5):
        assert load.read(store, load.chain(number, 6)) == {"hit": 6}
    store.close()
