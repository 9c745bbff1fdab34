"""Decode steps of a large model: launched kernel by kernel and as graphs; a shared prefix read by each row and once for all."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from benchmarks.gpu.common import device_option, median_s, random_model, seconds_of
from benchmarks.gpu.figures import Figure, emit
from engine.attention.choose import make_backend
from engine.attention.flashinfer_backend import FlashInferBackend
from engine.batch import Batch, Chunk
from engine.graphs import CudaCapture
from engine.runner import ModelRunner

PAGE_SIZE = 32
RUNS = 15


def main() -> None:
    """Time steps of several sizes."""
    device = device_option()
    real = device.type == "cuda"
    context, sizes, shared = (1024, [1, 8, 32], 16384) if real else (64, [1, 2], 128)
    model = random_model(device)
    geometry = model.geometry(PAGE_SIZE)
    pages = max(sizes) * (context // PAGE_SIZE + 1) + shared // PAGE_SIZE
    pool = torch.zeros(pages + 1, geometry.page_bytes, dtype=torch.uint8, device=device)
    backend = make_backend("auto", pool, geometry, model.layers, model.dtype)
    runner = ModelRunner(model, backend)
    apart = [_row(i * (context // PAGE_SIZE + 1), context) for i in range(max(sizes))]
    eager = {size: median_s(partial(runner.forward, Batch(apart[:size])), device, RUNS) for size in sizes}
    prefix = np.arange(pages - shared // PAGE_SIZE, pages, dtype=np.int32)
    together = [Chunk(row.tokens, shared + PAGE_SIZE - 1, np.concatenate([prefix, row.pages[:1]])) for row in apart]
    if real:
        took_s = seconds_of(lambda: runner.capture_decodes(sizes, pages, 1 + len(prefix), CudaCapture()), device)
        emit(Figure("decode", f"capturing {len(sizes)} sizes, with and without shared prefixes", took_s, "s"))
    for size in sizes:
        emit(Figure("decode", f"step of {size} x {context} without graphs", eager[size] * 1e3, "ms"))
        if runner.has_graphs:
            graphs_s = median_s(partial(runner.forward, Batch(apart[:size])), device, RUNS)
            emit(Figure("decode", f"step of {size} x {context} with graphs", graphs_s * 1e3, "ms", eager[size] * 1e3))
    if isinstance(backend, FlashInferBackend):
        once_s = median_s(partial(runner.forward, Batch(together)), device, RUNS)
        backend.cascade_tokens = 1 << 60
        each_s = median_s(partial(runner.forward, Batch(together)), device, RUNS)
        what = f"step of {len(together)} that share {shared} tokens"
        emit(Figure("decode", f"{what}, each reads them", each_s * 1e3, "ms"))
        emit(Figure("decode", f"{what}, read once", once_s * 1e3, "ms", each_s * 1e3))


def _row(first_page: int, context: int) -> Chunk:
    """The next token of a sequence of `context` tokens on neighbouring pages."""
    return Chunk(np.array([7], np.int32), context, np.arange(first_page, first_page + context // PAGE_SIZE + 1, dtype=np.int32))


if __name__ == "__main__":
    main()
