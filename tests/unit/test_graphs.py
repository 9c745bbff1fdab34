"""Decode steps of fixed size: the same logits as without, whatever the batch is filled up with.

Here a graph is a recording of what the model does on a CPU; with CUDA's own it is tried in tests/gpu and `make test-gpu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.attention.flashinfer_backend import FlashInferBackend
from engine.attention.torch_backend import TorchBackend
from engine.batch import Batch, Chunk
from engine.graphs import graph_sizes
from engine.model import load_model
from engine.runner import ModelRunner
from tests.models import make_tiny_model
from tests.recording import record
from tests.reference_kernels import ReferenceKernels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.model import LoadedModel

PAGE_SIZE, PAGES = 4, 64
SPARE = PAGES


class Pair:
    """A runner over planned kernels beside one over the reference, each with a pool of its own."""

    def __init__(self, model: LoadedModel, sizes: list[int], **limits: int) -> None:
        geometry = model.geometry(PAGE_SIZE)
        pools = [torch.zeros(PAGES + 1, geometry.page_bytes, dtype=torch.uint8) for _ in range(2)]
        self.backend = FlashInferBackend(pools[0], geometry, model.layers, model.dtype, ReferenceKernels())
        for name, value in limits.items():
            setattr(self.backend, name, value)
        self.runner = ModelRunner(model, self.backend)
        self.replayed = 0
        if sizes:
            self.runner.capture_decodes(sizes, SPARE, 16, self.capture)
            assert self.runner.has_graphs
        self.reference = ModelRunner(model, TorchBackend(pools[1], geometry, model.layers, model.dtype))

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        recorded = record(run)

        def replay() -> torch.Tensor:
            self.replayed += 1
            return recorded()

        return replay

    def step(self, *chunks: Chunk) -> None:
        batch = Batch(chunks)
        torch.testing.assert_close(self.runner.forward(batch), self.reference.forward(batch), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp(request.param)
    return load_model(str(make_tiny_model(request.param, path)), device="cpu")


def chunk(pages: list[int], start: int, *tokens: int) -> Chunk:
    return Chunk(np.array(tokens, np.int32), start, np.array(pages, np.int32))


def test_a_batch_is_replayed_by_the_smallest_graph_that_holds_it(model):
    pair = Pair(model, [1, 2, 4])
    pair.step(chunk([3, 9], 0, 5, 6, 7, 8, 9), chunk([1], 0, 11, 12))
    pair.step(chunk([3, 9], 5, 10), chunk([1], 2, 13))
    pair.step(chunk([2], 0, 14), chunk([3, 9], 6, 10), chunk([1], 3, 13))
    assert pair.replayed == 2
    pair.step(chunk([2], 1, 14), chunk([3, 9], 7, 10), chunk([1, 7], 4, 13), chunk([4], 0, 7), chunk([5], 0, 7))
    pair.step(chunk([2], 2, 15), chunk([1, 7], 5, 13, 14))
    assert pair.replayed == 2


@pytest.mark.parametrize("sizes", [[], [4, 8]], ids=["eager", "graphs"])
def test_rows_that_share_a_prefix_come_back_in_the_order_they_were_given(model, sizes):
    pair = Pair(model, sizes, cascade_tokens=8)
    pair.step(chunk([10, 11, 12], 0, *range(3, 15)))
    tails = {i: chunk([10, 11, 12, 20 + i], 12, 30 + i, 31 + i) for i in range(4)}
    pair.step(*tails.values(), chunk([40, 41], 0, 9, 8, 7, 6, 5))
    for at in (14, 15):
        rows = [chunk([10, 11, 12, 20 + i], at, 50 + i) for i in (2, 0, 3)]
        rows.insert(1, chunk([40, 41], at - 9, 60))
        pair.step(*rows)
    assert pair.replayed == (2 if sizes else 0)


def test_a_model_that_cant_be_recorded_runs_without_graphs(model, caplog):
    def refuse(run: object) -> Callable[[], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    pair = Pair(model, [])
    pair.runner.capture_decodes([2], SPARE, 16, refuse)
    assert not pair.runner.has_graphs
    assert "without CUDA graphs: operation not permitted when stream is capturing more" in caplog.text
    pair.step(chunk([3], 0, 5, 6))
    pair.step(chunk([3], 2, 7))


def test_sizes_are_few_near_each_other_and_end_at_the_most():
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]
