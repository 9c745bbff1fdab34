"""How pages are moved on a stream: parts of layers, runs within chunks, the choice between two ways, kernels."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hicache.errors import ConfigError
from hicache.geometry import LayerGeometry, PageGeometry
from hicache.pools import DevicePool, HostPool
from hicache.transfer.choose import copier_maker, copies_right, measure_costs
from hicache.transfer.copier import ThreadCopier
from hicache.transfer.cuda import CudaCopier
from hicache.transfer.io_backend import AutoBackend, Costs, DirectBackend, Move, Part, split_layers
from hicache.transfer.operation import CopyOp, Operation, OpKind
from tests.kernels import interpreted_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.transfer.io_backend import IoBackend

BOUNDS = (0, 100, 150, 350, 400)
ALL = (Part(0, 4, 0, 400),)


def pool(pages: int, page_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (pages, page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("pages", "least_bytes", "ends"),
    [(1, 0, [1, 2, 3, 4]), (1, 120, [2, 3, 4]), (2, 200, [1, 3, 4]), (1, 1000, [4]), (0, 1, [4]), (8, 400, [1, 2, 3, 4])],
)
def test_parts_are_whole_layers_of_at_least_so_many_bytes(pages: int, least_bytes: int, ends: list[int]) -> None:
    parts = split_layers(BOUNDS, pages, least_bytes)
    assert [part.end for part in parts] == ends
    assert [part.first for part in parts] == [0, *ends[:-1]]
    assert [(part.start, part.stop) for part in parts] == [(BOUNDS[part.first], BOUNDS[part.end]) for part in parts]


def test_bounds_of_a_geometry_are_where_its_layers_begin_and_end() -> None:
    geometry = PageGeometry(4, "bfloat16", (LayerGeometry(2, 8, 8), LayerGeometry(1, 24, 16)))
    assert geometry.bounds == (0, 256, 256 + 320)
    assert geometry.bounds[-1] == geometry.page_bytes


def test_runs_of_a_move_are_counted() -> None:
    rows = pool(16, 4, 0)
    assert Move(rows, slots(), rows, slots()).num_runs == 0
    assert Move(rows, slots(4, 5, 6), rows, slots(0, 1, 2)).num_runs == 1
    assert Move(rows, slots(4, 5, 7, 8), rows, slots(0, 1, 2, 4)).num_runs == 3


@pytest.mark.parametrize(("src", "dst"), [([-1], [0]), ([16], [0]), ([0], [4]), ([0], [-1])])
def test_slots_outside_a_pool_are_refused_before_anything_is_copied(src: list[int], dst: list[int]) -> None:
    with pytest.raises(IndexError, match="of a pool of"):
        Move(pool(16, 4, 0), slots(*src), pool(4, 4, 1), slots(*dst)).check()


@pytest.mark.parametrize(
    ("target", "want"),
    [("cpu", [(3, 5), (5, 10), (10, 15), (15, 17)]), ("meta", [(3, 6), (6, 11), (11, 16), (16, 17)])],
    ids=["host is the destination", "host is the source"],
)
def test_no_direct_copy_crosses_a_chunk_of_the_host_pool(
    target: str, want: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = pool(20, 8, 0), torch.zeros(20, 8, dtype=torch.uint8, device=target)
    copied: list[range] = []
    copy = torch.Tensor.copy_

    def spy(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        first = self.storage_offset() // 8
        copied.append(range(first, first + len(self)))
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", spy)
    moved = np.arange(2, 16, dtype=np.int32)
    list(DirectBackend(chunk_pages=5).copy(Move(src, moved, dst, moved + 1), ALL))
    assert [(run.start, run.stop) for run in copied] == want
    if target == "cpu":
        assert (dst[3:17] == src[2:16]).all()


def test_the_kernel_is_taken_where_runs_cost_more_than_it_does() -> None:
    costs = Costs(run_s=10e-6, direct_byte_s=1 / 50e9, kernel_byte_s=1 / 40e9)
    assert not costs.prefer_kernel(num_runs=1, num_bytes=100 << 20)
    assert costs.prefer_kernel(num_runs=1600, num_bytes=100 << 20)
    assert "direct 46.6 GiB/s, page by page 5.4 GiB/s, kernel 37.3 GiB/s" in costs.describe(64 << 10)


class Named:
    """Yields parts that tell who it was."""

    def __init__(self, name: int) -> None:
        self._name = name

    def copy(self, move: Move, parts: Sequence[Part]) -> Iterator[Part]:
        yield Part(self._name, 0, 0, 0)


def test_auto_asks_its_costs_at_every_copy() -> None:
    auto = AutoBackend(Named(1), Named(2), Costs(run_s=1e-6, direct_byte_s=1e-10, kernel_byte_s=2e-10))
    rows = pool(64, 1024, 0)
    forth = np.arange(64, dtype=np.int32)
    assert next(iter(auto.copy(Move(rows, forth, rows, forth), ALL))).first == 1
    assert next(iter(auto.copy(Move(rows, forth[::-1].copy(), rows, forth), ALL))).first == 2


def test_costs_are_measured_on_the_pools_themselves() -> None:
    direct = DirectBackend(chunk_pages=1 << 20)
    src, dst = pool(64, 4096, 0), pool(80, 4096, 1)
    costs = measure_costs(src, dst, direct, direct)
    assert costs.direct_byte_s > 0
    assert costs.kernel_byte_s > costs.direct_byte_s  # page by page, where the other was in one run
    assert (dst[:64] == src.flip(0)).all()


def test_a_cpu_has_threads_whatever_is_asked_for_and_no_kernel() -> None:
    device, host = DevicePool(4, 64), HostPool(4, 64)
    for name in ("auto", "direct"):
        copier = copier_maker(device, host, (0, 64), name)(SimpleQueue())
        assert isinstance(copier, ThreadCopier)
        copier.close()
    with pytest.raises(ConfigError, match="--hicache-io-backend kernel needs a GPU"):
        copier_maker(device, host, (0, 64), "kernel")


# ---- kernels


@pytest.fixture(scope="module")
def kernel() -> IoBackend:
    return interpreted_kernels()


@pytest.mark.parametrize("page_bytes", [32, 1031, 20_002, 46_080], ids="word of {} bytes".format)
def test_kernel_moves_each_part_of_the_pages_named_and_nothing_else(kernel: IoBackend, page_bytes: int) -> None:
    src, dst = pool(9, page_bytes, 0), pool(12, page_bytes, 1)
    before, at, to = dst.clone(), slots(3, 1, 8, 7, 0), slots(0, 11, 5, 6, 7)
    bounds = (0, page_bytes // 3, page_bytes // 2, page_bytes)
    want = before.clone()
    for part in kernel.copy(Move(src, at, dst, to), split_layers(bounds, 5, 0)):
        want[to.tolist(), part.start : part.stop] = src[at.tolist(), part.start : part.stop]
        assert (dst == want).all()
    assert (dst[to.tolist()] == src[at.tolist()]).all()


def test_kernel_moves_more_tiles_than_it_has_programs(kernel: IoBackend) -> None:
    src, dst = pool(40, 40_000, 0), torch.zeros(40, 40_000, dtype=torch.uint8)
    order = np.random.default_rng(0).permutation(40).astype(np.int32)
    list(kernel.copy(Move(src, order, dst, np.arange(40, dtype=np.int32)), split_layers((0, 40_000), 40, 0)))
    assert (dst == src[order.tolist()]).all()


def test_kernel_moves_nothing_when_nothing_is_named(kernel: IoBackend) -> None:
    dst = pool(4, 64, 0)
    before = dst.clone()
    assert list(kernel.copy(Move(pool(4, 64, 1), slots(), dst, slots()), ALL)) == list(ALL)
    assert (dst == before).all()


def test_a_backend_that_misplaces_bytes_is_found_out(kernel: IoBackend) -> None:
    class Shifted:
        def copy(self, move: Move, parts: Sequence[Part]) -> Iterator[Part]:
            move.dst[move.dst_slots.tolist()] = move.src[move.src_slots.tolist()].roll(1, 1)
            yield from parts

    host = HostPool(5, 256)
    assert copies_right(kernel, host, torch.device("cpu"))
    assert copies_right(DirectBackend(2), host, torch.device("cpu"))
    assert not copies_right(Shifted(), host, torch.device("cpu"))


def test_kernel_compiles_for_gpus_with_loads_of_16_bytes() -> None:
    triton = pytest.importorskip("triton", reason="needs Triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hicache.transfer.gather_kernel import BLOCK_WORDS, WARPS, copy_tiles

    pointers = {"src": "*i64", "dst": "*i64", "src_slots": "*i32", "dst_slots": "*i32"}
    numbers = dict.fromkeys(("page_words", "first_word", "words", "tiles_a_page", "tiles"), "i32")
    divisible = {(at,): [["tt.divisibility", 16]] for at in range(len(pointers) + 3)}
    function = triton.runtime.JITFunction(copy_tiles.fn)
    source = ASTSource(function, {**pointers, **numbers, "BLOCK": "constexpr"}, {"BLOCK": BLOCK_WORDS}, divisible)
    for arch in (80, 90):
        ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": WARPS}).asm["ptx"]
        assert "ld.global.v2.b64" in ptx
        assert "st.global.v2.b64" in ptx


# ---- gates


def test_a_load_back_has_a_gate_once_it_is_issued_and_a_backup_has_none() -> None:
    device, host = DevicePool(4, 400), HostPool(4, 400)
    posted: SimpleQueue[Operation] = SimpleQueue()
    direct = DirectBackend(4)
    backends: dict[OpKind, IoBackend] = {OpKind.BACKUP: direct, OpKind.LOAD_BACK: direct}
    copier = CudaCopier(device, host, posted, backends=backends, bounds=BOUNDS)
    ops = {
        kind: CopyOp(kind=kind, on_end=lambda op: None, ids=slots(0), src=slots(at), dst=slots(0))
        for kind, at in ((OpKind.LOAD_BACK, 1), (OpKind.BACKUP, 2))
    }
    bad = CopyOp(kind=OpKind.LOAD_BACK, on_end=lambda op: None, ids=slots(0), src=slots(9), dst=slots(0))
    for op in (*ops.values(), bad):
        copier.submit(op)
    copier.close()
    assert bad.gate is None
    assert ops[OpKind.BACKUP].gate is None
    gate = ops[OpKind.LOAD_BACK].gate
    assert gate is not None
    for layer in range(4):
        gate.wait(layer)
    with pytest.raises(AssertionError, match="layer 4 of 4"):
        gate.wait(4)
