"""`hicache bench store`: the disk tier beside plain pwrite and pread, and beside memcpy, on the same pages in the same run."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol, cast, get_args

import numpy as np
import typer

from storage.base import GetOutcome, NamespaceInfo, PageRecord, PageRef, PutOutcome
from storage.lmdb_store import LmdbStore, SyncMode

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Figure", "measure", "store"]

PAGES_BY_KIB = {64: 4096, 360: 1024, 2048: 256}
_POOL_BYTES = 512 << 20
_BATCH_BYTES = 16 << 20  # a call of the store: what 350 tokens of SmolLM2 take
_TOKENS = bytes(256)  # 64 tokens


class Figure(NamedTuple):
    """One throughput; pages written once, or read into rotating slots of a mapped pool."""

    subject: str
    page_kib: int
    op: str
    gib_s: float


class _Load(NamedTuple):
    """The pages of a run: one page's content, the pool's slots, and how many pages go into one call of the store.

    shift: where in the pool a subject starts, so that no subject reads into what another has just warmed.
    """

    page: memoryview
    slots: list[memoryview]
    pages: int
    batch: int
    shift: int = 0

    def slot(self, at: int) -> memoryview:
        """Where page `at` is read to."""
        return self.slots[(at + self.shift) % len(self.slots)]


class _Subject(Protocol):
    """Something that writes pages `[first, end)` once, then reads them."""

    def write(self, first: int, end: int) -> None: ...
    def read(self, first: int, end: int) -> None: ...
    def close(self) -> None: ...


def measure(folder: Path, runs: int, sync: SyncMode) -> Iterator[Figure]:
    """Measure every page size; yields medians over runs.

    Within a run the subjects take turns batch by batch, so that what else the machine does hits them alike.
    """
    pool = memoryview(mmap.mmap(-1, _POOL_BYTES))
    np.frombuffer(pool, dtype=np.uint8)[:] = 1  # map it
    for page_kib, pages in PAGES_BY_KIB.items():
        size = page_kib << 10
        slots = [pool[at : at + size] for at in range(0, _POOL_BYTES - size + 1, size)]
        load = _Load(memoryview(os.urandom(size)), slots, pages, max(1, _BATCH_BYTES // size))
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(runs):
            for case, took in _run(folder, load, sync).items():
                seconds[case].append(took)
        for (subject, op), times in seconds.items():
            yield Figure(subject, page_kib, op, round(pages * size / 2**30 / statistics.median(times), 2))


def _run(folder: Path, load: _Load, sync: SyncMode) -> dict[tuple[str, str], float]:
    """Write and read all pages once; seconds by subject and operation."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        subjects: dict[str, _Subject] = {
            "lmdb": _Lmdb(Path(scratch) / "store", load, sync),
            "raw": _Raw(Path(scratch) / "raw.bin", load._replace(shift=len(load.slots) // 3)),
            "memcpy": _Memcpy(load._replace(shift=2 * len(load.slots) // 3)),
        }
        for op in ("write", "read"):
            for turn, first in enumerate(range(0, load.pages, load.batch)):
                for name in islice(cycle(subjects), turn % 3, turn % 3 + 3):  # nobody always comes first
                    do = getattr(subjects[name], op)
                    start = time.perf_counter()
                    do(first, min(first + load.batch, load.pages))
                    seconds[name, op] += time.perf_counter() - start
        for subject in subjects.values():
            subject.close()
    return seconds


def store(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a figure.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where to write (a temporary folder).")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs; medians are shown.")] = 5,
    sync: Annotated[str, typer.Option(help="The store's durability: none, batch or always.")] = "batch",
) -> None:
    """Measure the disk tier beside plain file I/O: checksum included, page cache warm, plain files never synced."""
    if sync not in get_args(SyncMode):
        raise typer.BadParameter(f"sync must be one of {', '.join(get_args(SyncMode))}")
    with tempfile.TemporaryDirectory(dir=folder, prefix="hicache-bench-") as scratch:
        figures = []
        for figure in measure(Path(scratch), runs, cast("SyncMode", sync)):
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


class _Raw:
    """One file; one pwrite and one pread a page."""

    def __init__(self, path: Path, load: _Load) -> None:
        self._load = load
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def write(self, first: int, end: int) -> None:
        page, size = self._load.page, self._load.page.nbytes
        for at in range(first, end):
            assert os.pwrite(self._fd, page, at * size) == size

    def read(self, first: int, end: int) -> None:
        size = self._load.page.nbytes
        for at in range(first, end):
            assert os.preadv(self._fd, [self._load.slot(at)], at * size) == size

    def close(self) -> None:
        os.close(self._fd)


class _Lmdb:
    """The store, one call a batch."""

    def __init__(self, folder: Path, load: _Load, sync: SyncMode) -> None:
        namespace = os.urandom(16)
        keys = [os.urandom(16) for _ in range(load.pages)]
        self._load = load
        self._refs = [PageRef(key, parent, namespace, _TOKENS) for key, parent in zip(keys, [namespace, *keys], strict=False)]
        self._store = LmdbStore(folder, 2 * load.pages * load.page.nbytes + (64 << 20), sync)
        self._store.register_namespace(NamespaceInfo(namespace))

    def write(self, first: int, end: int) -> None:
        outcomes = self._store.put_many([PageRecord(ref, self._load.page) for ref in self._refs[first:end]])
        assert set(outcomes) == {PutOutcome.STORED}

    def read(self, first: int, end: int) -> None:
        outcomes = self._store.get_many(self._refs[first:end], [self._load.slot(at) for at in range(first, end)])
        assert set(outcomes) == {GetOutcome.HIT}

    def close(self) -> None:
        self._store.close()


class _Memcpy:
    """Copies within memory: what no file can beat."""

    def __init__(self, load: _Load) -> None:
        self._load = load

    def write(self, first: int, end: int) -> None:
        for at in range(first, end):
            self._load.slot(at)[:] = self._load.page

    read = write

    def close(self) -> None:
        pass
