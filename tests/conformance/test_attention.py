"""Every attention backend against dense attention written out here, over scattered pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionBackend, LayerCall, LayerSpec
from engine.attention.torch_backend import TorchBackend
from engine.batch import Batch, Chunk
from hicache.geometry import LayerGeometry, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Callable

BACKENDS: dict[str, Callable[..., AttentionBackend]] = {"torch": TorchBackend}
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

    def __init__(self, make: Callable[..., AttentionBackend], variant: Variant, page_size: int, kv_dtype: str) -> None:
        self.variant, self.page_size = variant, page_size
        self.generator = torch.Generator().manual_seed(7)
        shape = LayerGeometry(variant.kv_heads, variant.k_dim, variant.v_dim)
        self.geometry = PageGeometry(page_size, kv_dtype, (shape, shape))
        self.layers = [
            LayerSpec(i, i, True, variant.q_heads, variant.kv_heads, variant.k_dim, variant.v_dim, variant.scale,
                      variant.window, variant.softcap, variant.sinks)
            for i in range(2)
        ]  # fmt: skip
        need = 3 * (160 // page_size + 1)
        self.pool = torch.full((need + 5, self.geometry.page_bytes), 0xFF, dtype=torch.uint8)  # every element is nan
        order = torch.randperm(need + 5, generator=self.generator).numpy().astype(np.int32)
        self.tables = [order[i * (need // 3) : (i + 1) * (need // 3)] for i in range(3)]
        self.unused = order[need:]
        self.backend = make(self.pool, self.geometry, self.layers, torch.float32)
        self.sinks = self.randn(variant.q_heads) if variant.sinks else None
        self.kv_dtype: torch.dtype = getattr(torch, kv_dtype)
        self.keys = [[self.randn(0, variant.kv_heads, variant.k_dim) for _ in range(3)] for _ in self.layers]
        self.values = [[self.randn(0, variant.kv_heads, variant.v_dim) for _ in range(3)] for _ in self.layers]

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def step(self, lengths: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run a step of new tokens of each sequence; returns (backend's output, expected) of each layer."""
        chunks = [Chunk(np.zeros(n, np.int32), self.keys[0][i].shape[0], self.tables[i]) for i, n in enumerate(lengths) if n]
        self.backend.plan(Batch(chunks))
        return [self._layer(layer, lengths) for layer in self.layers]

    def _layer(self, layer: LayerSpec, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        total, expected, at = sum(lengths), [], 0
        q = self.randn(total, layer.q_heads, layer.k_dim)
        k = self.randn(total, layer.kv_heads, layer.k_dim)
        v = self.randn(total, layer.kv_heads, layer.v_dim)
        for i, n in enumerate(lengths):
            rows = slice(at, at + n)
            at += n
            keys, values = self.keys[layer.layer_idx], self.values[layer.layer_idx]
            keys[i] = torch.cat([keys[i], k[rows].to(self.kv_dtype).float()])
            values[i] = torch.cat([values[i], v[rows].to(self.kv_dtype).float()])
            expected.append(reference(layer, q[rows], keys[i], values[i], self.sinks))
        return self.backend.attend(layer, LayerCall(q, k, v, self.sinks)), torch.cat(expected)


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
def make(request: pytest.FixtureRequest) -> Callable[..., AttentionBackend]:
    return BACKENDS[request.param]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_output_is_that_of_dense_attention(make, variant, steps, page_size):
    rig = Rig(make, variant, page_size, "float32")
    for lengths in steps:
        for got, expected in rig.step(lengths):
            torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "steps", [[[9, 5, 0], [6, 1, 3], [1, 1, 1]], [[3, 90, 0], [2, 2, 5], [1, 1, 1]]], ids=["even", "uneven"]
)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_queries_see_keys_as_rounded_to_the_kv_dtype_whether_new_or_cached(make, kv_dtype, steps):
    rig = Rig(make, Variant(), 4, kv_dtype)
    for lengths in steps:
        for got, expected in rig.step(lengths):
            torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)


def test_pages_not_in_the_batch_keep_their_bytes(make):
    rig = Rig(make, Variant(), 4, "float32")
    rig.step([9, 5, 0])
    others = torch.from_numpy(np.concatenate([rig.unused, rig.tables[2], rig.tables[0][4:]])).long()
    before = rig.pool[rig.tables[0][:2]].clone()
    rig.step([3, 1, 0])
    assert (rig.pool[others] == 0xFF).all()
    assert torch.equal(rig.pool[rig.tables[0][:2]], before)


def test_a_page_holds_the_keys_and_values_of_its_tokens_in_the_order_of_the_geometry(make):
    rig = Rig(make, Variant(k_dim=24, v_dim=12), 4, "float32")
    rig.step([8, 0, 0])
    page = rig.pool[int(rig.tables[0][1])].view(torch.float32)
    parts = [part[0][4:8].reshape(-1) for layer in range(2) for part in (rig.keys[layer], rig.values[layer])]
    assert torch.equal(page, torch.cat(parts))


def test_a_layer_that_shares_reads_the_source_layers_pages_and_writes_nothing(make):
    rig = Rig(make, Variant(), 4, "float32")
    rig.step([9, 5, 0])
    rig.backend.plan(Batch([Chunk(np.zeros(1, np.int32), 9, rig.tables[0])]))
    source = rig.layers[0]
    k, v = rig.randn(1, 2, 16), rig.randn(1, 2, 16)
    q = rig.randn(1, 4, 16)
    rig.backend.attend(source, LayerCall(q, k, v))
    before = rig.pool.clone()
    shared = source._replace(layer_idx=2, writes=False)
    got = rig.backend.attend(shared, LayerCall(q, k, v))
    keys, values = torch.cat([rig.keys[0][0], k]), torch.cat([rig.values[0][0], v])
    torch.testing.assert_close(got.double(), reference(shared, q, keys, values, None), atol=2e-6, rtol=1e-5)
    assert torch.equal(rig.pool, before)
