"""Attention on page blobs against the same kernels on a dense layout (each layer's keys and values in one piece).

Both go through all layers in turn, so that neither finds its pages in the GPU's cache, and run alternately.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.gpu.common import LARGE, SMALL, device_option, seconds_of
from benchmarks.gpu.figures import Figure, emit
from engine.attention.flashinfer_kernels import FlashInferKernels
from engine.attention.gather import LayerPages, layer_pages
from engine.attention.kernels import AttentionShape
from engine.attention.paged_plan import plan_tables
from engine.batch import Chunk
from hicache.geometry import LayerGeometry, PageGeometry
from tests.reference_kernels import ReferenceKernels

if TYPE_CHECKING:
    from engine.attention.kernels import Kernels, PagedKernel

MOST = 1.05
"""How much longer attention may take on blobs."""
RUNS = 15
CASES = {"decode 32 x 4096": (32, 4095, 1), "prefill 4096 after 4096": (1, 4096, 4096)}


def main() -> None:
    """Compare every case at several page sizes."""
    device = device_option()
    real = device.type == "cuda"
    kernels: Kernels = FlashInferKernels(device) if real else ReferenceKernels(device)
    for page_size in (16, 64):
        for case, (rows, start, new) in CASES.items():
            scale = 1 if real else 256
            chunks = _chunks(max(1, rows // scale), start // scale, max(1, new // scale), page_size)
            kernel = kernels.decode() if new == 1 else kernels.prompt()
            blobs_s, dense_s = _alternate(kernel, chunks, page_size, device)
            ratio = statistics.median(a / b for a, b in zip(blobs_s, dense_s, strict=True))
            raw = {"blobs_s": blobs_s, "dense_s": dense_s}
            emit(Figure("attention", f"{case}, pages of {page_size}: blobs / dense", ratio, "x", MOST, raw=raw))


def _chunks(rows: int, start: int, new: int, page_size: int) -> list[Chunk]:
    """Sequences over scattered pages."""
    pages = -(-(start + new) // page_size)
    order = np.random.default_rng(0).permutation(rows * pages).astype(np.int32).reshape(rows, pages)
    return [Chunk(np.zeros(new, np.int32), start, table) for table in order]


def _alternate(
    kernel: PagedKernel, chunks: list[Chunk], page_size: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Seconds of each run over all layers, on blobs and on the dense layout."""
    shape = LARGE if device.type == "cuda" else SMALL
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    dtype = torch.bfloat16
    geometry = PageGeometry(page_size, "bfloat16", (LayerGeometry(kv_heads, dim, dim),) * shape["num_hidden_layers"])
    pages = sum(len(chunk.pages) for chunk in chunks)
    pool = torch.zeros(pages, geometry.page_bytes, dtype=torch.uint8, device=device)
    blobs = layer_pages(pool, geometry, dtype)
    for layer in blobs:
        layer.k.normal_()
        layer.v.normal_()
    dense = [LayerPages(layer.k.contiguous(), layer.v.contiguous()) for layer in blobs]
    attention = AttentionShape(heads, kv_heads, dim, page_size, dim**-0.5, None, None, dtype, dtype)
    kernel.plan(plan_tables(chunks, page_size, None), attention)
    q = torch.randn(sum(len(chunk.tokens) for chunk in chunks), heads, dim, dtype=dtype, device=device)

    def over(layers: list[LayerPages]) -> float:
        return seconds_of(lambda: [kernel.run(q, layer) for layer in layers], device)

    if not torch.equal(kernel.run(q, blobs[0]), kernel.run(q, dense[0])):
        raise SystemExit("attention on blobs and on the dense layout differ")
    over(blobs), over(dense)
    times = [(over(blobs), over(dense)) if run % 2 else (over(dense), over(blobs))[::-1] for run in range(RUNS)]
    return [blob for blob, _ in times], [flat for _, flat in times]


if __name__ == "__main__":
    main()
