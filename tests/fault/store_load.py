"""Loads for the tests of the LMDB store: pages that are a function of their key, and writers to be killed.

Run as a program, it writes and reads at random for ever: `python store_load.py FOLDER CAPACITY_BYTES SEED`. It prints "ready"
once open, "wrong" and exits with 1 if a page ever holds other bytes than its key says, and its tally when told to stop.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from storage.base import GetOutcome, NamespaceInfo, PageRecord, PageRef
from storage.lmdb_store import LmdbStore

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CAPACITY",
    "NAMESPACE",
    "await_load",
    "begin_load",
    "chain",
    "disk_bytes",
    "open_store",
    "payload_of",
    "read",
    "start_load",
    "write",
]

CAPACITY = 16 << 20
NAMESPACE = bytes(range(16))
SIZES = (20_000, 65_536, 300_000)


def chain(number: int, pages: int) -> list[PageRef]:
    """A conversation; its number decides keys and the size of its pages."""
    refs, parent = [], NAMESPACE
    for at in range(pages):
        key = number.to_bytes(8, "little") + at.to_bytes(8, "little")
        refs.append(PageRef(key, parent, NAMESPACE, key * 16))
        parent = key
    return refs


def payload_of(ref: PageRef) -> bytes:
    number = int.from_bytes(ref.key[:8], "little")
    size = SIZES[number % len(SIZES)]
    return (ref.key * (size // 16 + 1))[:size]


def open_store(folder: Path, capacity: int = CAPACITY, floor: int = 0, clock: Callable[[], int] = time.time_ns) -> LmdbStore:
    store = LmdbStore(folder, capacity, free_floor_bytes=floor, clock=clock)
    store.register_namespace(NamespaceInfo(NAMESPACE, {"model": "test"}))
    return store


def write(store: LmdbStore, refs: list[PageRef]) -> Counter[str]:
    outcomes = store.put_many([PageRecord(ref, memoryview(payload_of(ref))) for ref in refs])
    return Counter(outcome.value for outcome in outcomes)


def read(store: LmdbStore, refs: list[PageRef]) -> Counter[str]:
    """Read pages; "wrong" counts hits with other bytes than were written."""
    buffers = [memoryview(bytearray(len(payload_of(ref)))) for ref in refs]
    tally: Counter[str] = Counter()
    for ref, buffer, outcome in zip(refs, buffers, store.get_many(refs, buffers), strict=True):
        tally[outcome.value if outcome is not GetOutcome.HIT or buffer == payload_of(ref) else "wrong"] += 1
    return tally


def disk_bytes(folder: Path) -> int:
    """Bytes of blocks that the folder takes, itself included."""
    paths = [folder, *folder.iterdir()]
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def start_load(folder: Path, seed: int, capacity: int = CAPACITY) -> subprocess.Popen[str]:
    """Start this file as a program and wait until its store is open."""
    process = begin_load(folder, seed, capacity)
    await_load(process)
    return process


def begin_load(folder: Path, seed: int, capacity: int = CAPACITY) -> subprocess.Popen[str]:
    """Start this file as a program."""
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, __file__, str(folder), str(capacity), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root})


def await_load(process: subprocess.Popen[str]) -> None:
    """Wait until its store is open."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def main(folder: str, capacity: str, seed: str) -> int:
    rng = random.Random(int(seed))
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    store = open_store(Path(folder), int(capacity))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    tally: Counter[str] = Counter()
    while not stopped:
        refs = chain(rng.randrange(200), rng.randrange(1, 12))
        tally += write(store, refs) if rng.random() < 0.5 else read(store, refs)
        if rng.random() < 0.05:
            store.sync()
        if tally["wrong"]:
            sys.stdout.write("wrong\n")
            return 1
    store.close()
    sys.stdout.write(" ".join(f"{name}={count}" for name, count in sorted(tally.items())) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
