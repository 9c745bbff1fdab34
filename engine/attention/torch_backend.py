"""Attention over page blobs in plain torch operations: the backend of CPUs, and the reference for the others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from engine.attention.dense import dense_attention
from engine.attention.torch_plan import fresh_tails, plan_segments, plan_writes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.attention.base import LayerCall, LayerSpec
    from engine.attention.torch_plan import DecodeGroup, PromptSegment, Segments, WriteIndex
    from engine.batch import Batch
    from hicache.geometry import PageGeometry

__all__ = ["TorchBackend"]


class _LayerPages(NamedTuple):
    """K (num_pages, page_size, kv_heads, k_dim) and V (…, v_dim) of a page layer: strided views of the pool."""

    k: torch.Tensor
    v: torch.Tensor


class TorchBackend:
    """Gathers the pages of a sequence into a workspace and attends there.

    Gathering costs a copy a layer, about a fifth of a decode step's attention at 4,000 tokens, and buys torch's own fused
    kernel on one flat run of keys. Grouped queries never repeat keys: at decode the group is the query axis, and in a prompt
    keys are expanded with stride 0.

    pool: uint8 (num_pages, page_bytes), borrowed for the backend's life. layers: every attention layer of the model.
    dtype: of the model's activations; KV is rounded to the geometry's dtype before anything attends to it, so that a token
    sees the same keys whether they were just computed or come from a cache.
    """

    def __init__(self, pool: torch.Tensor, geometry: PageGeometry, layers: Sequence[LayerSpec], dtype: torch.dtype) -> None:
        assert pool.dtype == torch.uint8, pool.dtype
        assert pool.ndim == 2, pool.shape
        assert pool.shape[1] == geometry.page_bytes, (pool.shape, geometry.page_bytes)
        self._pool = pool
        self._page_size = geometry.page_size
        self._dtype = dtype
        self._kv_dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._pages = _layer_views(pool, geometry, self._kv_dtype)
        self._windows = {layer.window for layer in layers}
        self._gathered = _Workspace(self._kv_dtype, pool.device)
        self._converted = _Workspace(dtype, pool.device)
        self._writes: WriteIndex | None = None
        self._segments: dict[int | None, Segments] = {}

    def plan(self, batch: Batch) -> None:
        """Compute indices and masks of a step, and zero the pages that it begins and doesn't fill.

        A page's tail is gathered with the page and masked; left-overs there must be finite, since 0 * nan is nan.
        """
        device = self._pool.device
        fresh = fresh_tails(batch, self._page_size, device)
        if fresh is not None:
            self._pool.index_fill_(0, fresh, 0)
        self._writes = plan_writes(batch, self._page_size, device)
        self._segments = {
            window: plan_segments(batch, self._page_size, window, device, self._dtype) for window in self._windows
        }

    def attend(self, layer: LayerSpec, call: LayerCall) -> torch.Tensor:
        """Write k and v to the planned pages (unless the layer shares), attend causally per sequence.

        Returns (T, q_heads, v_dim) in q's dtype.
        """
        pages = self._pages[layer.pages_of]
        k, v = self._rounded(call.k), self._rounded(call.v)
        if layer.writes:
            self._write(pages, k, v)
        segments = self._segments[layer.window]
        if len(segments.decodes) == 1 and segments.decodes[0].rows is None:
            return self._attend_decodes(layer, call, pages, segments.decodes[0])
        out = call.q.new_empty(call.q.shape[0], layer.q_heads, layer.v_dim)
        for segment in segments.prompts:
            rows = slice(segment.begin, segment.end)
            out[rows] = self._attend_prompt(layer, call, pages, segment, k[rows], v[rows])
        for group in segments.decodes:
            out[group.rows] = self._attend_decodes(layer, call, pages, group)
        return out

    def _write(self, pages: _LayerPages, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store (T, kv_heads, ·) tensors of the KV dtype in the step's slots."""
        assert self._writes is not None, "attend before plan"
        at = (self._writes.pages, self._writes.offsets)
        _bits(pages.k)[at] = _bits(k)
        _bits(pages.v)[at] = _bits(v)

    def _attend_prompt(
        self,
        layer: LayerSpec,
        call: LayerCall,
        pages: _LayerPages,
        segment: PromptSegment,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Attend for one sequence's rows; returns (rows, q_heads, v_dim)."""
        if segment.pages is None:
            keys, values = k.to(self._dtype), v.to(self._dtype)
        else:
            low, high = segment.keys
            keys, values = (part[0, low:high] for part in self._gather(pages, segment.pages, 1))
        q = (
            call.q[segment.begin : segment.end]
            .view(-1, layer.kv_heads, layer.q_heads // layer.kv_heads, layer.k_dim)
            .permute(1, 2, 0, 3)
        )
        out = _attend_sequence(layer, q, keys.transpose(0, 1), values.transpose(0, 1), segment.mask, call.sinks)
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _attend_decodes(self, layer: LayerSpec, call: LayerCall, pages: _LayerPages, group: DecodeGroup) -> torch.Tensor:
        """Attend for one row each of several sequences; returns (rows, q_heads, v_dim)."""
        q = call.q if group.rows is None else call.q[group.rows]
        q = q.view(-1, layer.kv_heads, layer.q_heads // layer.kv_heads, layer.k_dim)
        low, high = group.keys
        keys, values = (part[:, low:high].transpose(1, 2) for part in self._gather(pages, group.pages, group.sequences))
        if _is_fused(layer):
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask, scale=layer.scale)
        else:
            out = _dense_decodes(layer, q, keys, values, group.mask, call.sinks)
        return out.flatten(1, 2)

    def _gather(self, pages: _LayerPages, index: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy pages of `count` sequences to the workspace: K and V as (count, tokens, kv_heads, ·) in the model's dtype.

        Good until the next gather.
        """
        out = []
        for name, source in (("k", pages.k), ("v", pages.v)):
            shape = (len(index), *source.shape[1:])
            target = self._gathered.take(name, shape)
            torch.index_select(_bits(source), 0, index, out=_bits(target))
            if self._dtype != self._kv_dtype:
                target = self._converted.take(name, shape).copy_(target)
            out.append(target.view(count, -1, *source.shape[2:]))
        return out[0], out[1]

    def _rounded(self, kv: torch.Tensor) -> torch.Tensor:
        return kv.to(self._kv_dtype)


class _Workspace:
    """Two buffers, for K and for V, that grow to the largest step seen and are reused by every layer.

    Fresh memory for each layer would cost page faults worth several times the copy.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffers = {name: torch.empty(0, dtype=dtype, device=device) for name in ("k", "v")}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A buffer of `shape` with arbitrary content, good until the next take of the same name."""
        size = math.prod(shape)
        if self._buffers[name].numel() < size:
            self._buffers[name] = self._buffers[name].new_empty(size + size // 4)
        return self._buffers[name][:size].view(shape)


def _layer_views(pool: torch.Tensor, geometry: PageGeometry, dtype: torch.dtype) -> list[_LayerPages]:
    """Strided views of each layer's K and V in the pool."""
    elements = pool.view(dtype)
    num_pages, page_elements = elements.shape

    def view(offset_bytes: int, heads: int, dim: int) -> torch.Tensor:
        shape = (num_pages, geometry.page_size, heads, dim)
        strides = (page_elements, heads * dim, dim, 1)
        return elements.as_strided(shape, strides, elements.storage_offset() + offset_bytes // geometry.itemsize)

    return [
        _LayerPages(view(k_at, layer.kv_heads, layer.k_dim), view(v_at, layer.kv_heads, layer.v_dim))
        for layer, (k_at, v_at) in zip(geometry.layers, geometry.offsets, strict=True)
    ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that every indexing kernel knows: 8-bit floats as bytes."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


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
