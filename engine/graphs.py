"""Decode steps as CUDA graphs: a step of hundreds of small kernels is launched at once instead of one by one from Python.

A graph replays the very kernels it recorded, on the very memory. So each is made for a number of rows, over buffers that never
move (a *slot* of the attention backend, and the tokens' ids and positions); a smaller batch is filled up with rows that belong
to nobody and write to a page that the cache never hands out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from engine.batch import Chunk, SharedPrefix

if TYPE_CHECKING:
    from engine.attention.flashinfer_backend import DecodeSlot, FlashInferBackend
    from engine.batch import Batch

__all__ = ["Capture", "Compute", "CudaCapture", "DecodeGraphs", "graph_sizes"]

Replay = Callable[[], torch.Tensor]
Capture = Callable[[Replay], Replay]


class Compute(Protocol):
    """The model on planned attention."""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute token ids at positions, int64 (T,) each; returns float32 logits (len(rows), vocab) at `rows` (int64)."""
        ...


class CudaCapture:
    """Records what a function does on the GPU. All recordings share one pool of memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        """Run once to warm up and once to record; returns what replays it, into the same result every time."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # kernels are compiled and loaded, and libraries take their workspaces, outside of the recording
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class DecodeGraphs:
    """Graphs of decode steps, for a few sizes of batches, with and without shared prefixes. Used by one thread.

    sizes: numbers of rows. spare_page: a device slot that nobody owns. max_pages: the most pages that a row can see.
    capture: makes a function that repeats another's work. Captures all, largest first; raises what that raises.
    """

    def __init__(
        self,
        backend: FlashInferBackend,
        compute: Compute,
        sizes: list[int],
        spare_page: int,
        max_pages: int,
        capture: Capture,
        device: torch.device,
    ) -> None:
        self._plain: dict[int, _Graph] = {}
        self._sharing: dict[int, _Graph] = {}
        for rows in sorted(sizes, reverse=True):
            self._plain[rows] = _Graph(backend, compute, backend.slot(rows, 0, max_pages), spare_page, capture, device)
            if rows > 1:
                slot = backend.slot(rows, min(backend.cascade_groups, rows // 2), max_pages)
                self._sharing[rows] = _Graph(backend, compute, slot, spare_page, capture, device)

    def find(self, batch: Batch) -> _Graph | None:
        """The smallest graph that a batch of decodes fits into; None if there is none."""
        graphs = self._sharing if batch.shared else self._plain
        fitting = [rows for rows in graphs if rows >= len(batch.chunks)]
        return graphs[min(fitting)] if fitting else None


class _Graph:
    """One captured step of a fixed number of rows."""

    def __init__(
        self,
        backend: FlashInferBackend,
        compute: Compute,
        slot: DecodeSlot,
        spare_page: int,
        capture: Capture,
        device: torch.device,
    ) -> None:
        self._backend = backend
        self._slot = slot
        self._inputs = torch.zeros(2, slot.rows, dtype=torch.int64, device=device)
        self._spare = Chunk(np.zeros(1, np.int32), 0, np.array([spare_page], np.int32))
        rows = torch.arange(slot.rows, device=device)
        if slot.groups:  # the first plan has all rows behind a prefix: there can't be more later
            behind = Chunk(np.zeros(1, np.int32), backend.page_size, np.full(2, spare_page, np.int32))
            self._fill([behind] * slot.rows, [SharedPrefix(0, slot.rows, 1)])
        else:
            self._fill([], [])
        self._replay = capture(lambda: compute(self._inputs[0], self._inputs[1], rows))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a step of at most as many decodes; returns float32 (rows, vocab), good until the next step."""
        self._fill(list(batch.chunks), list(batch.shared))
        return self._replay()[: len(batch.chunks)]

    def _fill(self, chunks: list[Chunk], shared: list[SharedPrefix]) -> None:
        """Plan a step that is filled up with nobody's rows."""
        padded = chunks + [self._spare] * (self._slot.rows - len(chunks))
        self._backend.plan_slot(self._slot, padded, shared)
        inputs = np.array([[chunk.tokens[0] for chunk in padded], [chunk.start for chunk in padded]], np.int64)
        self._inputs.copy_(torch.from_numpy(inputs))


def graph_sizes(most: int) -> list[int]:
    """Batch sizes worth a graph: few, and near enough that filling up costs little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most, 16)]
    return [*(size for size in sizes if size < most), most]
