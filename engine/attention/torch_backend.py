"""Attention over page blobs in plain torch operations: the backend of CPUs, and the reference for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.attention.dense import dense_attention
from engine.attention.gather import Gatherer, bits, layer_pages, to_kv
from engine.attention.torch_plan import fresh_tails, plan_segments, plan_writes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.attention.base import LayerCall, LayerSpec
    from engine.attention.torch_plan import DecodeGroup, PromptSegment, Segments, WriteIndex
    from engine.batch import Batch
    from hicache.geometry import PageGeometry

__all__ = ["TorchBackend"]


class TorchBackend:
    """Gathers the pages of a sequence into a workspace and attends there.

    Gathering costs a copy a layer, about a third of a decode step's attention at 4,000 tokens, and buys torch's own fused
    kernel on one flat run of keys. Grouped queries never repeat keys: at decode the group is the query axis, and in a prompt
    keys are expanded with stride 0.

    pool: uint8 (num_pages, page_bytes), borrowed for the backend's life. layers: every attention layer of the model.
    dtype: of the model's activations; KV is rounded to the geometry's dtype before anything attends to it, so that a token
    sees the same keys whether they were just computed or come from a cache.
    """

    name = "torch"

    def __init__(self, pool: torch.Tensor, geometry: PageGeometry, layers: Sequence[LayerSpec], dtype: torch.dtype) -> None:
        assert pool.dtype == torch.uint8, pool.dtype
        assert pool.ndim == 2, pool.shape
        assert pool.shape[1] == geometry.page_bytes, (pool.shape, geometry.page_bytes)
        self._pool = pool
        self._page_size = geometry.page_size
        self._dtype = dtype
        self._kv_dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._pages = layer_pages(pool, geometry, self._kv_dtype)
        self._windows = {layer.window for layer in layers}
        self._gatherer = Gatherer(self._pages, self._kv_dtype, dtype)
        self._writes: WriteIndex | None = None
        self._segments: dict[int | None, Segments] = {}

    def arrange(self, batch: Batch) -> tuple[Batch, None]:
        """Any order is as good as another."""
        return batch, None

    def plan(self, batch: Batch) -> None:
        """Compute indices and masks of a step, and zero the pages that it begins and doesn't fill.

        A page's tail is gathered with the page and masked; left-overs there must be finite, since 0 * nan is nan.
        """
        device = self._pool.device
        fresh = fresh_tails(batch, self._page_size, device)
        if fresh is not None:
            self._pool.index_fill_(0, fresh, 0)
        self._gatherer.forget()
        self._writes = plan_writes(batch, self._page_size, device)
        self._segments = {
            window: plan_segments(batch, self._page_size, window, device, self._dtype) for window in self._windows
        }

    def attend(self, layer: LayerSpec, call: LayerCall) -> torch.Tensor:
        """Write k and v to the planned pages (unless the layer shares), attend causally per sequence.

        Returns (T, q_heads, v_dim) in q's dtype.
        """
        k, v = to_kv(call.k, self._kv_dtype), to_kv(call.v, self._kv_dtype)
        if layer.writes:
            self._write(layer.pages_of, k, v)
        segments = self._segments[layer.window]
        if len(segments.decodes) == 1 and segments.decodes[0].rows is None:
            return self._attend_decodes(layer, call, segments.decodes[0])
        out = call.q.new_empty(call.q.shape[0], layer.q_heads, layer.v_dim)
        for segment in segments.prompts:
            rows = slice(segment.begin, segment.end)
            out[rows] = self._attend_prompt(layer, call, segment, k[rows], v[rows])
        for group in segments.decodes:
            out[group.rows] = self._attend_decodes(layer, call, group)
        return out

    def _write(self, page_layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store (T, kv_heads, ·) tensors of the KV dtype in the step's slots."""
        assert self._writes is not None, "attend before plan"
        pages = self._pages[page_layer]
        at = (self._writes.pages, self._writes.offsets)
        bits(pages.k)[at] = bits(k)
        bits(pages.v)[at] = bits(v)

    def _attend_prompt(
        self, layer: LayerSpec, call: LayerCall, segment: PromptSegment, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend for one sequence's rows, whose own keys and values are k and v; returns (rows, q_heads, v_dim)."""
        if segment.pages is None:
            keys, values = k.to(self._dtype).transpose(0, 1), v.to(self._dtype).transpose(0, 1)
        else:
            gathered = self._gatherer.gather(layer.pages_of, segment.pages, 1, segment.keys)
            keys, values = gathered.k[0], gathered.v[0]
        q = _grouped_queries(layer, call.q[segment.begin : segment.end]).permute(1, 2, 0, 3)
        out = _attend_sequence(layer, q, keys, values, segment.mask, call.sinks)
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _attend_decodes(self, layer: LayerSpec, call: LayerCall, group: DecodeGroup) -> torch.Tensor:
        """Attend for one row each of several sequences; returns (rows, q_heads, v_dim)."""
        q = _grouped_queries(layer, call.q if group.rows is None else call.q[group.rows])
        keys, values = self._gatherer.gather(layer.pages_of, group.pages, group.sequences, group.keys)
        if _is_fused(layer):
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask, scale=layer.scale)
        else:
            out = _dense_decodes(layer, q, keys, values, group.mask, call.sinks)
        return out.flatten(1, 2)


def _grouped_queries(layer: LayerSpec, q: torch.Tensor) -> torch.Tensor:
    """Queries (T, q_heads, k_dim) by the key head they read: (T, kv_heads, group, k_dim)."""
    return q.view(-1, layer.kv_heads, layer.q_heads // layer.kv_heads, layer.k_dim)


def _is_fused(layer: LayerSpec) -> bool:
    """Whether torch's fused kernel knows the layer's arithmetic."""
    return layer.softcap is None and not layer.sinks


def _attend_sequence(
    layer: LayerSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for q (kv_heads, group, T, k_dim) over k and v (kv_heads, L, ·); without a mask, causally."""
    if _is_fused(layer):
        group = q.shape[1]
        return F.scaled_dot_product_attention(
            q,
            k[:, None].expand(-1, group, -1, -1),
            v[:, None].expand(-1, group, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=layer.scale,
        )
    return dense_attention(
        q,
        k,
        v,
        mask=mask,
        is_causal=mask is None,
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=_grouped(layer, sinks),
    )


def _dense_decodes(
    layer: LayerSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for q (B, kv_heads, group, k_dim), one sequence after the other."""
    rows = [
        dense_attention(
            q[i, :, :, None],
            k[i],
            v[i],
            mask=None if mask is None else mask[i, 0],
            is_causal=False,
            scale=layer.scale,
            softcap=layer.softcap,
            sinks=_grouped(layer, sinks),
        )
        for i in range(q.shape[0])
    ]
    return torch.stack(rows).squeeze(3)


def _grouped(layer: LayerSpec, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Sinks as (kv_heads, group)."""
    return None if sinks is None else sinks.view(layer.kv_heads, -1)
