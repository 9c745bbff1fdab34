"""Attention by paged kernels that read the page blobs where they are: planned once a step, nothing gathered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.attention.gather import bits, layer_pages, to_kv
from engine.attention.kernels import AttentionShape
from engine.attention.paged_plan import arrange, own_tables, placement, plan_tables, prefix_tables
from engine.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from engine.attention.base import LayerCall, LayerSpec
    from engine.attention.gather import LayerPages
    from engine.attention.kernels import Kernels, PagedKernel
    from engine.batch import Chunk, SharedPrefix
    from hicache.geometry import PageGeometry

__all__ = ["DecodeSlot", "FlashInferBackend"]

CASCADE_TOKENS = 8192
"""Tokens that a shared prefix must spare its sequences from reading, together, before it is attended to on its own. The second
kernel and the merge cost a layer about what an H200 takes to read so many tokens of a model with 8 KV heads of 128."""

CASCADE_GROUPS = 4
"""Most prefixes a step that are attended to on their own."""


class _Planned(NamedTuple):
    """How the layers of one shape attend in the planned step. Rows [0, prefix_rows) see the prefix besides `own`."""

    own: PagedKernel
    prefix: PagedKernel | None = None
    prefix_rows: int = 0


class _Step(NamedTuple):
    """The planned step: where its tokens go, int64 (T,) each, and how each shape attends."""

    pages: torch.Tensor
    offsets: torch.Tensor
    planned: dict[AttentionShape, _Planned]


class FlashInferBackend:
    """Runs paged kernels on strided views of the pool.

    A step of decodes runs the decode kernel, with a cascade where the batch names shared prefixes and the layer has no window;
    any other step runs the prompt kernel, for which a decode is a prompt of one token.

    pool: uint8 (num_pages, page_bytes), borrowed for the backend's life. layers: every attention layer, K and V of one dim.
    dtype: of the model's activations. kernels: what attends; FlashInfer's, or others with the same meaning.
    """

    name = "flashinfer"
    cascade_tokens = CASCADE_TOKENS
    cascade_groups = CASCADE_GROUPS

    def __init__(
        self,
        pool: torch.Tensor,
        geometry: PageGeometry,
        layers: Sequence[LayerSpec],
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        assert pool.dtype == torch.uint8, pool.dtype
        assert pool.shape[1] == geometry.page_bytes, (pool.shape, geometry.page_bytes)
        self.page_size = geometry.page_size
        self._device = pool.device
        self._dtype = dtype
        self._kv_dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._pages = layer_pages(pool, geometry, self._kv_dtype)
        self._kernels = kernels
        self._shapes = list(dict.fromkeys(self._shape(layer) for layer in layers))
        self._prompt = {shape: kernels.prompt() for shape in self._shapes}
        self._decode = {shape: kernels.decode() for shape in self._shapes}
        self._prefix = {shape: kernels.prefix() for shape in self._shapes if shape.window is None}
        self._step: _Step | None = None

    def plan(self, batch: Batch) -> None:
        """Plan every shape's kernels for a step."""
        planned = {}
        decodes = all(len(chunk.tokens) == 1 for chunk in batch.chunks)
        for shape in self._shapes:
            own = (self._decode if decodes else self._prompt)[shape]
            prefix = self._prefix[shape] if batch.shared and shape.window is None else None
            planned[shape] = self._plan(batch, shape, own, prefix, len(batch.shared))
        at = placement(batch.chunks, self.page_size)
        self._step = _Step(torch.from_numpy(at.pages).to(self._device), torch.from_numpy(at.offsets).to(self._device), planned)

    def arrange(self, batch: Batch) -> tuple[Batch, npt.NDArray[np.int64] | None]:
        """Put decodes that share a long prefix side by side, so that it is read once for all of them."""
        return arrange(batch, self.page_size, self.cascade_tokens, self.cascade_groups)

    def slot(self, rows: int, groups: int, max_pages: int) -> DecodeSlot:
        """Make what a CUDA graph of `rows` decodes is captured over.

        groups: shared prefixes it has room for. max_pages: the most pages that a row can see.
        """
        own = {shape: self._kernels.fixed_decode(rows, rows * max_pages) for shape in self._shapes}
        prefix = {}
        if groups:
            prefix = {shape: self._kernels.fixed_prefix(rows, groups, groups * max_pages) for shape in self._prefix}
        return DecodeSlot(rows, groups, own, prefix, self._device)

    def plan_slot(self, slot: DecodeSlot, chunks: Sequence[Chunk], shared: Sequence[SharedPrefix]) -> None:
        """Plan a step of exactly `slot.rows` decodes in the slot's memory, for capturing or replaying its graph."""
        assert len(chunks) == slot.rows, f"{len(chunks)} chunks for {slot.rows} rows"
        batch = Batch(chunks, shared)
        planned = {}
        for shape in self._shapes:
            step = self._plan(batch, shape, slot.own[shape], slot.prefix.get(shape), slot.groups)
            planned[shape] = step._replace(prefix_rows=slot.rows)
        at = placement(batch.chunks, self.page_size)
        slot.pages.copy_(torch.from_numpy(at.pages))
        slot.offsets.copy_(torch.from_numpy(at.offsets))
        self._step = _Step(slot.pages, slot.offsets, planned)

    def attend(self, layer: LayerSpec, call: LayerCall) -> torch.Tensor:
        """Write k and v to the planned pages (unless the layer shares), attend causally per sequence.

        Returns (T, q_heads, v_dim) in q's dtype.
        """
        assert self._step is not None, "attend before plan"
        pages = self._pages[layer.pages_of]
        if layer.writes:
            at = (self._step.pages, self._step.offsets)
            bits(pages.k)[at] = bits(to_kv(call.k, self._kv_dtype))
            bits(pages.v)[at] = bits(to_kv(call.v, self._kv_dtype))
        planned = self._step.planned[self._shape(layer)]
        q = call.q.contiguous()
        if planned.prefix is None and call.sinks is None:
            return planned.own.run(q, pages)
        out, lse = planned.own.run_with_lse(q, pages)
        if planned.prefix is not None:
            self._add_prefix(planned.prefix, q[: planned.prefix_rows], pages, out, lse)
        return out if call.sinks is None else _sink(out, lse, call.sinks)

    def _plan(self, batch: Batch, shape: AttentionShape, own: PagedKernel, prefix: PagedKernel | None, groups: int) -> _Planned:
        """Plan one shape's kernels."""
        if prefix is None:
            own.plan(plan_tables(batch.chunks, self.page_size, shape.window), shape)
            return _Planned(own)
        own.plan(own_tables(batch, self.page_size), shape)
        upper = prefix_tables(batch, self.page_size, groups)
        prefix.plan(upper, shape)
        return _Planned(own, prefix, upper.rows)

    def _add_prefix(
        self, prefix: PagedKernel, q: torch.Tensor, pages: LayerPages, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Merge what the prefix gives into the first rows of out and lse. Rows of q without a prefix count for nothing."""
        rows = q.shape[0]
        other, other_lse = torch.zeros_like(out[:rows]), torch.full_like(lse[:rows], -torch.inf)
        prefix.run_with_lse(q, pages, other, other_lse)
        self._kernels.merge(out[:rows], lse[:rows], other, other_lse)

    def _shape(self, layer: LayerSpec) -> AttentionShape:
        return AttentionShape.of(layer, self.page_size, self._dtype, self._kv_dtype)


class DecodeSlot:
    """The memory and kernels of a fixed number of decodes. Belongs to the backend that made it."""

    def __init__(
        self,
        rows: int,
        groups: int,
        own: dict[AttentionShape, PagedKernel],
        prefix: dict[AttentionShape, PagedKernel],
        device: torch.device,
    ) -> None:
        self.rows = rows
        self.groups = groups
        self.own = own
        self.prefix = prefix
        self.pages = torch.zeros(rows, dtype=torch.int64, device=device)
        self.offsets = torch.zeros(rows, dtype=torch.int64, device=device)


def _sink(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Let a logit of each query head take part in a softmax whose sum is known: others keep sum / (sum + e ** sink)."""
    kept = torch.sigmoid(lse * math.log(2) - sinks.float())
    return (out * kept[..., None]).to(out.dtype)
