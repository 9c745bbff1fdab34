"""Times copies of pages between pools, by the server's own copier, in turns with the most that this machine can move.

On a CPU the limit is one memcpy of the same bytes by as many threads; on a GPU large copies of page-locked memory.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from itertools import cycle
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch

from engine.cli.bench_copy import PAGE_KIB, Figure
from hicache.pools import DevicePool, HostPool
from hicache.transfer.choose import copier_maker
from hicache.transfer.operation import CopyOp, OpKind, OpState

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicache.transfer.io_backend import IoBackendName
    from hicache.transfer.operation import Operation

    Ints = npt.NDArray[np.int32]

__all__ = ["CASES", "measure"]

_LAYERS, _REGIONS = 32, 6
Pattern = Literal["coalesced", "scattered"]


class _Case(NamedTuple):
    op: OpKind
    pattern: Pattern


CASES = [_Case(op, pattern) for op in (OpKind.BACKUP, OpKind.LOAD_BACK) for pattern in get_args(Pattern)]


class _Limit(Protocol):
    """Moves bytes [first, end) of one pool to the other at once; returns when they are there."""

    def __call__(self, kind: OpKind, first: int, end: int) -> None: ...


def measure(device: str, backend: IoBackendName, moved_mib: int, runs: int) -> Iterator[Figure]:
    """Copy `moved_mib` of pages of each size, there and back, `runs` times after a first one that is not counted.

    Raises ConfigError where the device or the backend is not to be had.
    """
    for page_kib in PAGE_KIB:
        bench = _Bench(page_kib << 10, max(1, (moved_mib << 10) // page_kib), device, backend)
        seconds: dict[_Case, list[tuple[float, float]]] = defaultdict(list)
        for turn in range(1 + runs):
            for case in CASES[:: -1 if turn % 2 else 1]:  # nobody always comes first
                seconds[case].append(bench.run(case, limit_first=turn % 2 == 0))
        bench.close()
        for case in CASES:
            counted = seconds[case][1:]
            copied, limit = (statistics.median(column) for column in zip(*counted, strict=True))
            share = statistics.median(limit_s / copied_s for copied_s, limit_s in counted)
            gib = bench.num_bytes / 2**30
            yield Figure(page_kib, case.op, case.pattern, round(gib / copied, 2), round(gib / limit, 2), round(share, 3))


class _Bench:
    """Pools, and the server's own copier. Every timing moves the next region of both, so that all find memory equally cold."""

    def __init__(self, page_bytes: int, pages: int, device: str, backend: IoBackendName) -> None:
        self.num_bytes = page_bytes * pages
        self._device, self._host = (
            DevicePool(_REGIONS * pages, page_bytes, device),
            HostPool(_REGIONS * pages, page_bytes, device),
        )
        self._posted: SimpleQueue[Operation] = SimpleQueue()
        bounds = [layer * page_bytes // _LAYERS for layer in range(_LAYERS + 1)]
        self._copier = copier_maker(self._device, self._host, bounds, backend)(self._posted)
        self._limit: _Limit = _Memcpy(self._device, self._host) if device == "cpu" else _Link(self._device, self._host)
        self._device.data.fill_(1)  # all memory is the machine's before the clock runs
        self._host.data[:] = 1
        self._pages = pages
        self._regions = cycle(range(_REGIONS))
        self._rng = np.random.default_rng(0)

    def run(self, case: _Case, *, limit_first: bool) -> tuple[float, float]:
        """Seconds of the copy and of the limit, one right after the other."""
        if limit_first:
            limit_s = self._time_limit(case.op)
            return self._time_copy(case), limit_s
        copied_s = self._time_copy(case)
        return copied_s, self._time_limit(case.op)

    def _time_limit(self, kind: OpKind) -> float:
        first = next(self._regions) * self.num_bytes
        begun_s = time.perf_counter()
        self._limit(kind, first, first + self.num_bytes)
        return time.perf_counter() - begun_s

    def _time_copy(self, case: _Case) -> float:
        first = next(self._regions) * self._pages
        src, dst = first + self._order(case.pattern), first + self._order(case.pattern)
        op = CopyOp(kind=case.op, on_end=lambda op: None, ids=src, src=src, dst=dst)
        begun_s = time.perf_counter()
        self._copier.submit(op)
        self._posted.get()
        took_s = time.perf_counter() - begun_s
        assert op.state is OpState.DONE, op.error
        return took_s

    def _order(self, pattern: Pattern) -> Ints:
        forth = np.arange(self._pages, dtype=np.int32)
        return forth if pattern == "coalesced" else self._rng.permutation(forth)

    def close(self) -> None:
        """End the copier's threads."""
        self._copier.close()


class _Memcpy:
    """One memcpy on one thread, as many as the copier has for a direction."""

    def __init__(self, device: DevicePool, host: HostPool) -> None:
        self._device = device.data.numpy().reshape(-1)
        self._host = host.data.reshape(-1)

    def __call__(self, kind: OpKind, first: int, end: int) -> None:
        src, dst = (self._device, self._host) if kind is OpKind.BACKUP else (self._host, self._device)
        dst[first:end] = src[first:end]


class _Link:
    """Large asynchronous copies, one a stretch of host memory that was page-locked at once."""

    def __init__(self, device: DevicePool, host: HostPool) -> None:
        self._device = device.data.view(-1)
        self._host = torch.from_numpy(host.data).view(-1)
        self._chunk_bytes = host.chunk_pages * host.data.shape[1]
        self._stream: Any = torch.cuda.Stream(device.data.device)  # type: ignore[no-untyped-call]

    def __call__(self, kind: OpKind, first: int, end: int) -> None:
        src, dst = (self._device, self._host) if kind is OpKind.BACKUP else (self._host, self._device)
        with torch.cuda.stream(self._stream):
            while first < end:
                stop = min(end, (first // self._chunk_bytes + 1) * self._chunk_bytes)
                dst[first:stop].copy_(src[first:stop], non_blocking=True)
                first = stop
        self._stream.synchronize()
