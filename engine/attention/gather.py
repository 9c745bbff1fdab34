"""Pages of a sequence as one flat run of keys and values: gathered into a workspace that all layers reuse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from hicache.geometry import LayerGeometry, PageGeometry

__all__ = ["Gatherer", "LayerPages", "bits", "layer_pages", "to_kv"]


class LayerPages(NamedTuple):
    """K (num_pages, page_size, kv_heads, k_dim) and V (…, v_dim) of a page layer: strided views of the pool."""

    k: torch.Tensor
    v: torch.Tensor


class _Target(NamedTuple):
    """Where the pages of one segment go, for layers of one shape: `raw` takes the copy, `wide` is `raw` in the model's dtype
    (the same memory if that is the KV dtype), and `run` is how attention reads `wide`."""

    raw: LayerPages
    wide: LayerPages
    run: LayerPages


class Gatherer:
    """Copies the pages that a segment attends to into a workspace.

    Memory and views are made once for a segment and reused by every layer of the same shape: fresh memory for each layer
    would cost page faults worth several times the copy, and views as much as the copy at short contexts.
    """

    def __init__(self, pages: list[LayerPages], kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
        self._pages = pages
        self._converts = kv_dtype != dtype
        device = pages[0].k.device
        self._raw = {part: torch.empty(0, dtype=kv_dtype, device=device) for part in ("k", "v")}
        self._wide = {part: torch.empty(0, dtype=dtype, device=device) for part in ("k", "v")}
        self._targets: dict[tuple[int, torch.Size, torch.Size], _Target] = {}

    def forget(self) -> None:
        """Drop the views of the last step's segments."""
        self._targets.clear()

    def gather(self, layer: int, index: torch.Tensor, sequences: int, keys: tuple[int, int]) -> LayerPages:
        """Copy pages `index` (sequences * P,) of a page layer; returns K and V as (sequences, kv_heads, keys, ·).

        They are in the model's dtype, belong to the workspace and are good until the next gather.
        """
        pages = self._pages[layer]
        shape = (id(index), pages.k.shape, pages.v.shape)
        if shape not in self._targets:
            self._targets[shape] = self._target(pages, len(index), sequences, keys)
        target = self._targets[shape]
        torch.index_select(bits(pages.k), 0, index, out=bits(target.raw.k))
        torch.index_select(bits(pages.v), 0, index, out=bits(target.raw.v))
        if self._converts:
            target.wide.k.copy_(target.raw.k)
            target.wide.v.copy_(target.raw.v)
        return target.run

    def _target(self, pages: LayerPages, count: int, sequences: int, keys: tuple[int, int]) -> _Target:
        """Lay out the workspace for `count` pages of a layer's shape."""
        k_shape, v_shape = (count, *pages.k.shape[1:]), (count, *pages.v.shape[1:])
        raw = LayerPages(_take(self._raw, "k", k_shape), _take(self._raw, "v", v_shape))
        wide = raw
        if self._converts:
            wide = LayerPages(_take(self._wide, "k", k_shape), _take(self._wide, "v", v_shape))
        run = [part.view(sequences, -1, *part.shape[2:])[:, keys[0] : keys[1]].transpose(1, 2) for part in (wide.k, wide.v)]
        return _Target(raw, wide, LayerPages(*run))


def layer_pages(pool: torch.Tensor, geometry: PageGeometry, dtype: torch.dtype) -> list[LayerPages]:
    """Strided views of each layer's K and V in a pool, uint8 (num_pages, page_bytes)."""
    elements = pool.view(dtype)
    num_pages, page_elements = elements.shape

    def view(offset_bytes: int, heads: int, dim: int) -> torch.Tensor:
        shape = (num_pages, geometry.page_size, heads, dim)
        strides = (page_elements, heads * dim, dim, 1)
        return elements.as_strided(shape, strides, elements.storage_offset() + offset_bytes // geometry.itemsize)

    def of(layer: LayerGeometry, offsets: tuple[int, int]) -> LayerPages:
        return LayerPages(view(offsets[0], layer.kv_heads, layer.k_dim), view(offsets[1], layer.kv_heads, layer.v_dim))

    return [of(layer, offsets) for layer, offsets in zip(geometry.layers, geometry.offsets, strict=True)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that every indexing kernel knows: 8-bit floats as bytes."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def to_kv(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the KV dtype. 8-bit floats saturate: their overflow would be nan or infinity, and spoil a whole row."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        return tensor.clamp(-largest, largest).to(dtype)
    return tensor.to(dtype)


def _take(buffers: dict[str, torch.Tensor], part: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of `shape` on a buffer, which grows if it must."""
    size = math.prod(shape)
    if buffers[part].numel() < size:
        buffers[part] = buffers[part].new_empty(size + size // 4)
    return buffers[part][:size].view(shape)
