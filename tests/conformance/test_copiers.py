"""Every copier through one battery. A copier over another device joins by adding its kind to COPIERS."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import pytest
import torch

from hicache.pools import DevicePool, HostPool
from hicache.transfer.choose import copier_maker
from hicache.transfer.copier import ThreadCopier, copy_pages, runs
from hicache.transfer.cuda import CudaCopier
from hicache.transfer.io_backend import DirectBackend
from hicache.transfer.manual import ManualCopier
from hicache.transfer.operation import CopyOp, Operation, OpKind, OpState
from tests.kernels import interpreted_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.transfer.io_backend import IoBackend, IoBackendName
    from hicache.transfer.operation import Copier

DEVICE_PAGES, HOST_PAGES, PAGE_BYTES = 12, 16, 32
NOWHERE_NEAR = 10_000
"""A slot beyond any pool, which makes a copy fail."""


class Ready(Protocol):
    """Makes what was submitted end; called before the test waits."""

    def __call__(self, copier: Copier) -> None: ...


class CopierKind(NamedTuple):
    """How to build a copier, on which device, and what makes its copies end."""

    make: Callable[[DevicePool, HostPool, SimpleQueue[Operation]], Copier]
    device: str
    ready: Ready


def by_itself(copier: Copier) -> None:
    """Copies end without help."""


def by_hand(copier: Copier) -> None:
    """Complete what can be, fail what can't."""
    assert isinstance(copier, ManualCopier)
    for op in list(copier.pending):
        fits = max(op.src.max(initial=0), op.dst.max(initial=0)) < NOWHERE_NEAR
        (copier.complete if fits else fail_harmlessly(copier))(op)


def fail_harmlessly(copier: ManualCopier) -> Callable[[CopyOp], None]:
    """A failure whose destination is not there to be filled with garbage."""

    def fail(op: CopyOp) -> None:
        op.dst = op.dst[:0]
        copier.fail(op)

    return fail


BOUNDS = (0, 8, 12, PAGE_BYTES)
"""Three layers of different sizes."""


def on_streams(
    make_backend: Callable[[HostPool], IoBackend],
) -> Callable[[DevicePool, HostPool, SimpleQueue[Operation]], Copier]:
    """A CudaCopier; on a CPU the streams are torch's that do their work at once."""

    def make(device: DevicePool, host: HostPool, posted: SimpleQueue[Operation]) -> Copier:
        backends = {kind: make_backend(host) for kind in (OpKind.BACKUP, OpKind.LOAD_BACK)}
        return CudaCopier(device, host, posted, backends=backends, bounds=BOUNDS)

    return make


def chosen(name: IoBackendName) -> Callable[[DevicePool, HostPool, SimpleQueue[Operation]], Copier]:
    """What the server would use."""
    return lambda device, host, posted: copier_maker(device, host, BOUNDS, name)(posted)


def direct(host: HostPool) -> IoBackend:
    return DirectBackend(chunk_pages=3)


COPIERS = {
    "threads": CopierKind(ThreadCopier, "cpu", by_itself),
    "manual": CopierKind(ManualCopier, "cpu", by_hand),
    "streams direct": CopierKind(on_streams(direct), "cpu", by_itself),
    "streams kernel": CopierKind(on_streams(lambda host: interpreted_kernels()), "cpu", by_itself),
    "cuda direct": CopierKind(chosen("direct"), "cuda", by_itself),
    "cuda kernel": CopierKind(chosen("kernel"), "cuda", by_itself),
    "cuda auto": CopierKind(chosen("auto"), "cuda", by_itself),
}


class Bench:
    """Two pools of pages that say which they are, a copier between them, and what it posted."""

    def __init__(self, kind: CopierKind) -> None:
        self.device = DevicePool(DEVICE_PAGES, PAGE_BYTES, kind.device)
        self.host = HostPool(HOST_PAGES, PAGE_BYTES, kind.device)
        self.posted: SimpleQueue[Operation] = SimpleQueue()
        self.copier = kind.make(self.device, self.host, self.posted)  # which may use empty pools to measure
        for slot in range(DEVICE_PAGES):
            self.device.data[slot] = slot
        for slot in range(HOST_PAGES):
            self.host.data[slot] = 100 + slot
        self._ready = kind.ready

    def submit(self, kind: OpKind, src: list[int], dst: list[int]) -> CopyOp:
        def on_end(op: Operation) -> None:
            raise AssertionError("the owner runs on_end, no copier does")

        def slots(values: list[int]) -> np.ndarray:
            return np.array(values, np.int32)

        op = CopyOp(kind=kind, on_end=on_end, ids=slots(list(range(len(src)))), src=slots(src), dst=slots(dst))
        self.copier.submit(op)
        return op

    def wait(self, count: int) -> list[Operation]:
        """The next `count` operations posted."""
        self._ready(self.copier)
        return [self.posted.get(timeout=30) for _ in range(count)]

    def host_pages(self) -> list[int]:
        """What each host page says, which must be the same all over it."""
        assert (self.host.data == self.host.data[:, :1]).all()
        return self.host.data[:, 0].tolist()

    def device_pages(self) -> list[int]:
        data = self.device.data.cpu().numpy()
        assert (data == data[:, :1]).all()
        return data[:, 0].tolist()


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.gpu] * (kind.device == "cuda")) for name, kind in COPIERS.items()]
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    kind = COPIERS[request.param]
    if kind.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    bench = Bench(kind)
    yield bench
    bench.copier.close()


SLOTS = {
    "one page": ([3], [5]),
    "neighbours": ([2, 3, 4], [7, 8, 9]),
    "neighbours on one side only": ([2, 3, 4], [9, 7, 5]),
    "scattered": ([11, 0, 5, 6], [1, 2, 3, 8]),
    "downwards": ([4, 3, 2], [4, 3, 2]),
    "first and last": ([0, 11], [15, 0]),
    "nothing": ([], []),
}


@pytest.mark.parametrize(("src", "dst"), SLOTS.values(), ids=SLOTS)
def test_backup_copies_exactly_the_pages_named(bench: Bench, src: list[int], dst: list[int]) -> None:
    op = bench.submit(OpKind.BACKUP, src, dst)
    assert bench.wait(1) == [op]
    assert op.state is OpState.DONE
    want = [100 + slot for slot in range(HOST_PAGES)]
    for a, b in zip(src, dst, strict=True):
        want[b] = a
    assert bench.host_pages() == want
    assert bench.device_pages() == list(range(DEVICE_PAGES))


@pytest.mark.parametrize(("dst", "src"), SLOTS.values(), ids=SLOTS)
def test_load_back_copies_exactly_the_pages_named(bench: Bench, src: list[int], dst: list[int]) -> None:
    op = bench.submit(OpKind.LOAD_BACK, src, dst)
    assert bench.wait(1) == [op]
    assert op.state is OpState.DONE
    want = list(range(DEVICE_PAGES))
    for a, b in zip(src, dst, strict=True):
        want[b] = 100 + a
    assert bench.device_pages() == want
    assert bench.host_pages() == [100 + slot for slot in range(HOST_PAGES)]


def test_each_operation_is_posted_once_whatever_the_order(bench: Bench) -> None:
    ops = [bench.submit(OpKind.BACKUP, [slot], [slot]) for slot in range(8)]
    ops += [bench.submit(OpKind.LOAD_BACK, [8 + slot], [8 + slot]) for slot in range(4)]
    posted = bench.wait(len(ops))
    assert set(posted) == set(ops)
    assert bench.posted.empty()
    assert all(op.state is OpState.DONE and op.ended_s >= op.started_s for op in ops)


def test_copies_of_one_kind_take_effect_in_the_order_submitted(bench: Bench) -> None:
    for slot in range(10):
        bench.submit(OpKind.BACKUP, [slot], [0])
    bench.wait(10)
    assert bench.host_pages()[0] == 9


def test_what_was_backed_up_comes_back_unchanged(bench: Bench) -> None:
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 256, (4, PAGE_BYTES), np.uint8)
    for slot, page in enumerate(pages):
        bench.device.data[slot] = bench.device.data.new_tensor(page.tolist())
    bench.submit(OpKind.BACKUP, [0, 1, 2, 3], [5, 3, 9, 1])
    bench.wait(1)
    bench.device.data[:] = 0
    bench.submit(OpKind.LOAD_BACK, [1, 9, 3, 5], [3, 2, 1, 0])
    bench.wait(1)
    assert (bench.device.data[:4].cpu().numpy() == pages).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [OpKind.BACKUP, OpKind.LOAD_BACK])
def test_a_copy_that_fails_is_posted_as_failed_and_the_next_one_works(bench: Bench, kind: OpKind) -> None:
    bad = bench.submit(kind, [NOWHERE_NEAR], [1])
    good = bench.submit(kind, [2], [3])
    assert set(bench.wait(2)) == {bad, good}
    assert (bad.state, good.state) == (OpState.FAILED, OpState.DONE)
    assert bad.error
    assert bad.error_kind


def test_close_finishes_what_was_submitted_and_can_be_repeated(bench: Bench) -> None:
    ops = [bench.submit(OpKind.BACKUP, [slot], [slot]) for slot in range(6)]
    bench.copier.close()
    bench.copier.close()
    assert [bench.posted.get(timeout=30) for _ in ops] == ops
    assert bench.host_pages()[:6] == list(range(6))


def test_neighbours_are_coalesced() -> None:
    def slots(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    assert list(runs(slots(), slots())) == []
    assert list(runs(slots(4, 5, 6), slots(0, 1, 2))) == [(4, 0, 3)]
    assert list(runs(slots(4, 5, 7, 8), slots(0, 1, 2, 3))) == [(4, 0, 2), (7, 2, 2)]
    assert list(runs(slots(4, 5, 6), slots(0, 2, 3))) == [(4, 0, 1), (5, 2, 2)]
    assert list(runs(slots(3, 2), slots(3, 2))) == [(3, 3, 1), (2, 2, 1)]


def test_copy_between_pools_of_pages() -> None:
    src, dst = np.arange(12, dtype=np.uint8).reshape(4, 3), np.zeros((3, 3), np.uint8)
    copy_pages(src, np.array([2, 3, 0], np.int32), dst, np.array([0, 1, 2], np.int32))
    assert dst.tolist() == src[[2, 3, 0]].tolist()
