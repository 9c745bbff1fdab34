"""`hicache bench store`: the disk tier beside plain pwrite and pread, and beside memcpy, on the same pages in the same run."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import typer

from storage.base import GetOutcome, NamespaceInfo, PageRecord, PageRef, PutOutcome
from storage.lmdb_store import LmdbStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Figure", "measure", "store"]

PAGES_BY_KIB = {64: 4096, 360: 1024, 2048: 256}
_POOL_BYTES = 512 << 20
_BATCH_BYTES = 8 << 20
_TOKENS = bytes(256)  # 64 tokens


class Figure(NamedTuple):
    """One throughput; pages written once, or read into rotating slots of a mapped pool."""

    subject: str
    page_kib: int
    op: str
    gib_s: float


class _Load(NamedTuple):
    """The pages of a run: one page's content, the pool's slots, and how many pages go into one call of the store."""

    page: memoryview
    slots: list[memoryview]
    pages: int
    batch: int


def measure(folder: Path, runs: int) -> Iterator[Figure]:
    """Measure every page size; subjects take turns in each run, and the medians are yielded."""
    pool = memoryview(mmap.mmap(-1, _POOL_BYTES))
    np.frombuffer(pool, dtype=np.uint8)[:] = 1  # map it
    for page_kib, pages in PAGES_BY_KIB.items():
        size = page_kib << 10
        slots = [pool[at : at + size] for at in range(0, _POOL_BYTES - size + 1, size)]
        load = _Load(memoryview(os.urandom(size)), slots, pages, max(1, _BATCH_BYTES // size))
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(runs):
            for subject, run in _SUBJECTS.items():
                for op, took in run(folder, load).items():
                    seconds[subject, op].append(took)
        for (subject, op), times in seconds.items():
            yield Figure(subject, page_kib, op, round(pages * size / 2**30 / statistics.median(times), 2))


def store(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a figure.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where to write (a temporary folder).")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs; medians are shown.")] = 5,
) -> None:
    """Measure the disk tier beside plain file I/O: checksum included, page cache warm, no sync waited for."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="hicache-bench-") as scratch:
        figures = []
        for figure in measure(Path(scratch), runs):
            figures.append(figure)
            if as_json:
                typer.echo(json.dumps(figure._asdict()))
        if not as_json:
            _print_table(figures)


def _print_table(figures: list[Figure]) -> None:
    by_case = {(figure.subject, figure.page_kib, figure.op): figure.gib_s for figure in figures}
    typer.echo("page       op      lmdb    raw   share   memcpy   (GiB/s)")
    for page_kib in PAGES_BY_KIB:
        for op in ("write", "read"):
            lmdb, raw, copy = (by_case[subject, page_kib, op] for subject in ("lmdb", "raw", "memcpy"))
            typer.echo(f"{page_kib:>4} KiB   {op:<5} {lmdb:6.2f} {raw:6.2f}  {lmdb / raw:5.0%}   {copy:6.2f}")


# subjects


def _timed(do: Callable[[], None]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def _run_raw(folder: Path, load: _Load) -> dict[str, float]:
    """One file, one pwrite and one pread a page."""
    path, size = folder / "raw.bin", load.page.nbytes
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def write() -> None:
        for at in range(load.pages):
            assert os.pwrite(fd, load.page, at * size) == size

    def read() -> None:
        for at in range(load.pages):
            assert os.preadv(fd, [load.slots[at % len(load.slots)]], at * size) == size

    try:
        return {"write": _timed(write), "read": _timed(read)}
    finally:
        os.close(fd)
        path.unlink()


def _run_lmdb(folder: Path, load: _Load) -> dict[str, float]:
    namespace = os.urandom(16)
    keys = [os.urandom(16) for _ in range(load.pages)]
    refs = [PageRef(key, parent, namespace, _TOKENS) for key, parent in zip(keys, [namespace, *keys], strict=False)]
    capacity = load.pages * (load.page.nbytes + 8192) * 2 + (64 << 20)
    opened = LmdbStore(folder / f"lmdb-{namespace.hex()}", capacity)
    opened.register_namespace(NamespaceInfo(namespace))

    def write() -> None:
        for at in range(0, load.pages, load.batch):
            outcomes = opened.put_many([PageRecord(ref, load.page) for ref in refs[at : at + load.batch]])
            assert set(outcomes) == {PutOutcome.STORED}

    def read() -> None:
        for at in range(0, load.pages, load.batch):
            wanted = refs[at : at + load.batch]
            into = [load.slots[n % len(load.slots)] for n in range(at, at + len(wanted))]
            assert set(opened.get_many(wanted, into)) == {GetOutcome.HIT}

    try:
        return {"write": _timed(write), "read": _timed(read)}
    finally:
        opened.close()
        for path in (folder / f"lmdb-{namespace.hex()}").iterdir():
            path.unlink()


def _run_memcpy(folder: Path, load: _Load) -> dict[str, float]:
    del folder

    def copy() -> None:
        for at in range(load.pages):
            load.slots[at % len(load.slots)][:] = load.page

    return {"write": _timed(copy), "read": _timed(copy)}


_SUBJECTS: dict[str, Callable[[Path, _Load], dict[str, float]]] = {
    "raw": _run_raw,
    "lmdb": _run_lmdb,
    "memcpy": _run_memcpy,
}
