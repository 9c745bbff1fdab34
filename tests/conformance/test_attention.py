"""Every attention backend against dense attention written out here, over scattered pages."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionBackend, LayerCall, LayerSpec
from engine.attention.flashinfer_backend import FlashInferBackend
from engine.attention.flashinfer_kernels import FlashInferKernels
from engine.attention.paged_plan import arrange
from engine.attention.torch_backend import TorchBackend
from engine.batch import Batch, Chunk, SharedPrefix
from engine.graphs import CudaCapture
from hicache.geometry import LayerGeometry, PageGeometry
from tests.cuda import needs_cuda, needs_flashinfer
from tests.recording import record
from tests.reference_kernels import ReferenceKernels

if TYPE_CHECKING:
    from collections.abc import Callable


class Case(NamedTuple):
    """A backend under test, where and in which type it runs, and how close to float64 that brings it.

    head_dim: instead of the variants' own, where only some can be had.
    """

    make: Callable[..., AttentionBackend]
    device: str
    dtype: torch.dtype
    atol: float
    rtol: float
    head_dim: int | None = None


def _planned(pool: torch.Tensor, *args: Any) -> AttentionBackend:
    return FlashInferBackend(pool, *args, kernels=ReferenceKernels())


def _flashinfer(pool: torch.Tensor, *args: Any) -> AttentionBackend:
    return FlashInferBackend(pool, *args, kernels=_flashinfer_kernels())


@cache
def _flashinfer_kernels() -> FlashInferKernels:
    return FlashInferKernels(torch.device("cuda"))


BF16 = (torch.bfloat16, 2e-2, 2e-2)
FP16 = (torch.float16, 3e-3, 3e-3)
PAGED = {
    "planned": pytest.param(Case(_planned, "cpu", torch.float32, 2e-6, 1e-5), id="planned"),
    "flashinfer-bf16": pytest.param(Case(_flashinfer, "cuda", *BF16, 128), id="flashinfer-bf16", marks=needs_flashinfer),
}
"""Backends that read pages in place. "planned" is what they are told about a step, carried out by definition."""
KV_OF = {torch.bfloat16: ("bfloat16", "float8_e4m3fn", "float8_e5m2"), torch.float16: ("float16",)}
BACKENDS = [
    pytest.param(Case(TorchBackend, "cpu", torch.float32, 2e-6, 1e-5), id="torch"),
    PAGED["planned"],
    pytest.param(Case(TorchBackend, "cuda", torch.float32, 1e-4, 1e-4), id="torch-cuda", marks=needs_cuda),
    PAGED["flashinfer-bf16"],
]
FLASHINFER_FP16 = pytest.param(Case(_flashinfer, "cuda", *FP16, 128), id="flashinfer-fp16", marks=needs_flashinfer)
"""Only where types matter: each shape that is new to FlashInfer takes it a minute to compile."""
STEPS = {
    "one prompt": [[9]],
    "prompts together": [[17, 5, 1]],
    "chunks of prompts": [[7, 0, 3], [16, 9, 0], [5, 2, 8]],
    "decode after prompts": [[23, 9, 14], [1, 1, 1], [1, 1, 1]],
    "decode beside a prompt": [[23, 0, 4], [1, 12, 1], [1, 1, 9]],
    "very different lengths": [[120, 3, 60], [1, 1, 1]],
}


class Variant(NamedTuple):
    """Shape and arithmetic of the layers under test."""

    q_heads: int = 4
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float = 0.25


VARIANTS = {
    "grouped": Variant(),
    "one head each": Variant(kv_heads=4),
    "one key head": Variant(kv_heads=1, q_heads=3),
    "K and V dims differ": Variant(k_dim=24, v_dim=12),
    "window": Variant(window=5),
    "window of one": Variant(window=1),
    "softcap": Variant(softcap=2.0),
    "sinks": Variant(sinks=True),
    "sinks and window": Variant(sinks=True, window=6),
    "softcap, sinks and window": Variant(sinks=True, window=6, softcap=3.0),
}


class Rig:
    """Two layers of a variant over a pool of scattered pages, and all keys and values seen so far of three sequences."""

    def __init__(self, case: Case, variant: Variant, page_size: int, kv_dtype: str | None = None) -> None:
        if case.make is not TorchBackend and variant.k_dim != variant.v_dim:
            pytest.skip("paged kernels read keys and values of one dim")
        if case.head_dim is not None:
            variant = variant._replace(k_dim=case.head_dim, v_dim=case.head_dim, scale=case.head_dim**-0.5)
        self.case, self.variant, self.page_size = case, variant, page_size
        self.generator = torch.Generator().manual_seed(7)
        shape = LayerGeometry(variant.kv_heads, variant.k_dim, variant.v_dim)
        kv_dtype = kv_dtype or str(case.dtype).removeprefix("torch.")
        self.geometry = PageGeometry(page_size, kv_dtype, (shape, shape))
        self.layers = [
            LayerSpec(i, i, True, variant.q_heads, variant.kv_heads, variant.k_dim, variant.v_dim, variant.scale,
                      variant.window, variant.softcap, variant.sinks)
            for i in range(2)
        ]  # fmt: skip
        need = 3 * (160 // page_size + 1)
        shape_of_pool = (need + 5, self.geometry.page_bytes)
        self.pool = torch.full(shape_of_pool, 0xFF, dtype=torch.uint8, device=case.device)  # every element is nan
        order = torch.randperm(need + 5, generator=self.generator).numpy().astype(np.int32)
        self.tables = [order[i * (need // 3) : (i + 1) * (need // 3)] for i in range(3)]
        self.unused = order[need:]
        self.backend = case.make(self.pool, self.geometry, self.layers, case.dtype)
        self.sinks = self.randn(variant.q_heads) if variant.sinks else None
        self.kv_dtype: torch.dtype = getattr(torch, kv_dtype)
        self.keys = [[self.randn(0, variant.kv_heads, variant.k_dim) for _ in range(3)] for _ in self.layers]
        self.values = [[self.randn(0, variant.kv_heads, variant.v_dim) for _ in range(3)] for _ in self.layers]

    def randn(self, *shape: int) -> torch.Tensor:
        """Numbers that the case's type holds exactly."""
        return torch.randn(shape, generator=self.generator).to(self.case.dtype).float()

    def attend(self, layer: LayerSpec, *parts: torch.Tensor | None) -> torch.Tensor:
        """The backend's answer to a call of CPU tensors, as one."""
        call = LayerCall(*(part if part is None else part.to(self.case.device, self.case.dtype) for part in parts))
        return self.backend.attend(layer, call).double().cpu()

    def batch(self, lengths: list[int]) -> Batch:
        """The next tokens of each sequence."""
        return Batch(
            [Chunk(np.zeros(n, np.int32), self.keys[0][i].shape[0], self.tables[i]) for i, n in enumerate(lengths) if n]
        )

    def step(self, lengths: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run a step of new tokens of each sequence; returns (backend's output, expected) of each layer."""
        self.backend.plan(self.batch(lengths))
        return self.layer_outputs([(i, n) for i, n in enumerate(lengths) if n])

    def layer_outputs(self, rows: list[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run the planned step, in which each of `rows` is a sequence and its new tokens."""
        out = []
        for layer in self.layers:
            parts, expected = self.new_tokens(layer, rows)
            out.append((self.attend(layer, *parts, self.sinks), expected))
        return out

    def fork(self, source: int, pages: int) -> None:
        """Let the other sequences begin with a sequence's first pages."""
        tokens = pages * self.page_size
        for i in {0, 1, 2} - {source}:
            self.tables[i] = np.concatenate([self.tables[source][:pages], self.tables[i][pages:]])
            for stored in (*self.keys, *self.values):
                stored[i] = stored[source][:tokens].clone()

    def check(self, outputs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Compare with what was expected."""
        for got, expected in outputs:
            torch.testing.assert_close(got, expected, atol=self.case.atol, rtol=self.case.rtol)

    def new_tokens(
        self, layer: LayerSpec, rows: list[tuple[int, int]], padding: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Queries, keys and values of a step, with `padding` rows that are nobody's, and what attention gives for `rows`."""
        total, expected, at = sum(n for _, n in rows), [], 0
        q = self.randn(total + padding, layer.q_heads, layer.k_dim)
        k = self.randn(total + padding, layer.kv_heads, layer.k_dim)
        v = self.randn(total + padding, layer.kv_heads, layer.v_dim)
        for i, n in rows:
            new = slice(at, at + n)
            at += n
            keys, values = self.keys[layer.layer_idx], self.values[layer.layer_idx]
            keys[i] = torch.cat([keys[i], k[new].to(self.kv_dtype).float()])
            values[i] = torch.cat([values[i], v[new].to(self.kv_dtype).float()])
            expected.append(reference(layer, q[new], keys[i], values[i], self.sinks))
        return [q, k, v], torch.cat(expected)


def reference(layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention by its definition, in float64: every query against every key, hidden ones at weight 0."""
    group = layer.q_heads // layer.kv_heads
    k, v = (part.double().repeat_interleave(group, 1) for part in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * layer.scale
    if layer.softcap is not None:
        logits = torch.tanh(logits / layer.softcap) * layer.softcap
    ages = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(k.shape[0])
    seen = (ages >= 0) & (ages < (layer.window or k.shape[0]))
    weights = logits.exp() * seen
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, v)


@pytest.fixture(params=BACKENDS)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(params=PAGED.values())
def paged(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_output_is_that_of_dense_attention(case, variant, steps, page_size):
    rig = Rig(case, variant, page_size)
    for lengths in steps:
        rig.check(rig.step(lengths))


@pytest.mark.parametrize(
    "steps", [[[9, 5, 0], [6, 1, 3], [1, 1, 1]], [[3, 90, 0], [2, 2, 5], [1, 1, 1]]], ids=["even", "uneven"]
)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("case", [*BACKENDS, FLASHINFER_FP16])
def test_queries_see_keys_as_rounded_to_the_kv_dtype_whether_new_or_cached(case, kv_dtype, steps):
    if case.head_dim is not None and kv_dtype not in KV_OF[case.dtype]:
        pytest.skip(f"FlashInfer does not read {kv_dtype} KV with {case.dtype} queries, or nothing new would be seen")
    rig = Rig(case, Variant(), 4, kv_dtype)
    for lengths in steps:
        rig.check(rig.step(lengths))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_keys_beyond_the_range_of_8_bit_floats_are_its_largest(case, kv_dtype):
    rig = Rig(case, Variant(), 4, kv_dtype)
    rig.backend.plan(rig.batch([1, 0, 0]))
    heads, dim = rig.variant.kv_heads, rig.variant.k_dim
    largest = torch.finfo(rig.kv_dtype).max
    v = torch.full((1, heads, dim), -1e6 if case.dtype != torch.float16 else -6e4)
    got = rig.attend(rig.layers[0], torch.ones(1, rig.variant.q_heads, dim), -v, v, None)
    rig.check([(got, torch.full_like(got, -largest))])


def test_pages_not_in_the_batch_keep_their_bytes(case):
    rig = Rig(case, Variant(), 4)
    rig.step([9, 5, 0])
    others = torch.from_numpy(np.concatenate([rig.unused, rig.tables[2], rig.tables[0][4:]])).long()
    before = rig.pool[rig.tables[0][:2]].clone()
    rig.step([3, 1, 0])
    assert (rig.pool[others] == 0xFF).all()
    assert torch.equal(rig.pool[rig.tables[0][:2]], before)


def test_a_page_holds_the_keys_and_values_of_its_tokens_in_the_order_of_the_geometry(case):
    rig = Rig(case, Variant(k_dim=24, v_dim=12) if case.make is TorchBackend else Variant(), 4)
    rig.step([8, 0, 0])
    page = rig.pool[int(rig.tables[0][1])].view(case.dtype).float().cpu()
    parts = [part[0][4:8].reshape(-1) for layer in range(2) for part in (rig.keys[layer], rig.values[layer])]
    assert torch.equal(page, torch.cat(parts))


def test_a_layer_that_shares_reads_the_source_layers_pages_and_writes_nothing(case):
    rig = Rig(case, Variant(), 4)
    rig.step([9, 5, 0])
    rig.backend.plan(rig.batch([1, 0, 0]))
    source, dim = rig.layers[0], rig.variant.k_dim
    k, v = rig.randn(1, 2, dim), rig.randn(1, 2, dim)
    q = rig.randn(1, 4, dim)
    rig.attend(source, q, k, v)
    before = rig.pool.clone()
    shared = source._replace(layer_idx=2, writes=False)
    got = rig.attend(shared, q, k, v)
    keys, values = torch.cat([rig.keys[0][0], k]), torch.cat([rig.values[0][0], v])
    rig.check([(got, reference(shared, q, keys, values, None))])
    assert torch.equal(rig.pool, before)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_shared_prefix_is_attended_to_as_if_it_were_each_sequences_own(paged, variant, page_size):
    rig = Rig(paged, variant, page_size)
    rig.step([0, 4 * page_size + 1, 0])
    rig.fork(1, 3)
    rig.step([2, 1, 5])
    for _ in range(2 * page_size):
        batch, places = arrange(rig.batch([1, 1, 1]), page_size, 1, 4)
        assert [tuple(group) for group in batch.shared] == [(0, 3, 3)]
        assert places.tolist() == [0, 1, 2]
        rig.backend.plan(batch)
        rig.check(rig.layer_outputs([(0, 1), (1, 1), (2, 1)]))


ROWS = 5


class Slot:
    """A slot of ROWS decodes, captured over inputs that never move: by a CUDA graph, or on a CPU by a recording."""

    def __init__(self, rig: Rig, groups: int) -> None:
        self.rig, device = rig, torch.device(rig.case.device)
        self.spare = Chunk(np.zeros(1, np.int32), 4, np.full(2, rig.unused[0]))
        self.slot = rig.backend.slot(ROWS, groups, 40)
        rig.backend.plan_slot(self.slot, [self.spare] * ROWS, [SharedPrefix(0, ROWS, 1)] if groups else [])
        heads = (rig.variant.q_heads, rig.variant.kv_heads, rig.variant.kv_heads)
        self.inputs = [
            [torch.zeros(ROWS, count, rig.variant.k_dim, dtype=rig.case.dtype, device=device) for count in heads]
            for _ in rig.layers
        ]
        self.sinks = None if rig.sinks is None else rig.sinks.to(device, rig.case.dtype)
        capture = CudaCapture() if device.type == "cuda" else record
        self.replay = capture(self._attend)

    def _attend(self) -> torch.Tensor:
        calls = [LayerCall(*parts, self.sinks) for parts in self.inputs]
        return torch.stack([self.rig.backend.attend(*both) for both in zip(self.rig.layers, calls, strict=True)])

    def step(self, batch: Batch, sequences: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run one decode of each sequence; returns (output, expected) of each layer."""
        padding = ROWS - len(sequences)
        self.rig.backend.plan_slot(self.slot, [*batch.chunks, *[self.spare] * padding], batch.shared)
        wanted = []
        for layer, inputs in zip(self.rig.layers, self.inputs, strict=True):
            parts, expected = self.rig.new_tokens(layer, [(i, 1) for i in sequences], padding)
            wanted.append(expected)
            for held, part in zip(inputs, parts, strict=True):
                held.copy_(part)
        got = self.replay().double().cpu()[:, : len(sequences)]
        return list(zip(got, wanted, strict=True))


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "sharing"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_slot_takes_one_step_after_another_with_rows_that_are_nobodys(paged, variant, shares):
    rig = Rig(paged, variant, 4)
    rig.step([0, 9, 0])
    rig.fork(1, 2)
    rig.step([2, 1, 5])
    slot = Slot(rig, 2 if shares else 0)
    for lengths in ([1, 1, 1], [1, 0, 1], [1, 1, 1]):
        batch = rig.batch(lengths)
        if shares:
            batch, _ = arrange(batch, 4, 1, 2)
            assert batch.shared
        rig.check(slot.step(batch, [i for i, n in enumerate(lengths) if n]))
