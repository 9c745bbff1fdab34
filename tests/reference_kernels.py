"""The paged kernels by their definition, in plain torch on any device: what FlashInfer's must compute from the same arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tests.recording import opaque

if TYPE_CHECKING:
    from engine.attention.gather import LayerPages
    from engine.attention.kernels import AttentionShape
    from engine.attention.paged_plan import PagedTables

__all__ = ["ReferenceKernels"]


class PagedArrays(NamedTuple):
    """The arrays of PagedTables as tensors."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


class ReferenceKernels:
    """Makes kernels that follow the arrays one sequence at a time, in float64."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device

    def prompt(self) -> _Kernel:
        return _Kernel(causal=True)

    def prefix(self) -> _Kernel:
        return _Kernel(causal=False)

    def decode(self) -> _Kernel:
        return _Kernel(causal=True, decodes=True)

    def fixed_decode(self, rows: int, max_pages: int) -> _Kernel:
        return _Kernel(causal=True, decodes=True, sequences=rows, rows=rows, max_pages=max_pages)

    def fixed_prefix(self, rows: int, groups: int, max_pages: int) -> _Kernel:
        return _Kernel(causal=False, sequences=groups, rows=rows, max_pages=max_pages)

    def merge(self, out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
        weight, other_weight = lse.double().exp2(), other_lse.double().exp2()
        total = weight + other_weight
        out.copy_((out.double() * weight[..., None] + other.double() * other_weight[..., None]) / total[..., None])
        lse.copy_(total.log2())


class _Kernel:
    """One kernel. Its arrays are tensors; where sequences, rows and max_pages are given they are made once and never move, and
    plans are held to them, as FlashInfer's fixed wrappers do."""

    def __init__(
        self,
        *,
        causal: bool,
        decodes: bool = False,
        sequences: int | None = None,
        rows: int | None = None,
        max_pages: int | None = None,
    ) -> None:
        self._causal, self._decodes = causal, decodes
        self._sequences, self._rows, self._max_pages = sequences, rows, max_pages
        self._held: PagedArrays | None = None
        if sequences is not None and max_pages is not None:
            sizes = (sequences + 1, sequences + 1, max_pages, sequences)
            self._held = PagedArrays(*(torch.zeros(size, dtype=torch.int32) for size in sizes))

    def plan(self, tables: PagedTables, shape: AttentionShape) -> None:
        assert all(part.dtype == np.int32 for part in tables)
        count = len(tables.last_page_len)
        assert len(tables.qo_indptr) == len(tables.kv_indptr) == count + 1
        assert tables.kv_indptr[-1] == len(tables.kv_indices)
        has_pages = np.diff(tables.kv_indptr) > 0
        assert ((tables.last_page_len >= 1) == has_pages).all()
        assert (tables.last_page_len <= shape.page_size).all()
        if self._decodes:
            assert (np.diff(tables.qo_indptr) == 1).all()
        arrays = PagedArrays(*(torch.from_numpy(part) for part in tables))
        if self._held is None:
            self._arrays = arrays
        else:
            assert self._rows is not None
            assert count == self._sequences
            assert tables.rows <= self._rows
            for held, array in zip(self._held, arrays, strict=True):
                held[: len(array)].copy_(array)
            self._arrays = self._held
        self._shape = shape

    def run(self, q: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        return self.run_with_lse(q, pages)[0]

    def run_with_lse(
        self, q: torch.Tensor, pages: LayerPages, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert q.is_contiguous()
        assert (q.dtype, pages.k.dtype) == (self._shape.q_dtype, self._shape.kv_dtype)
        assert pages.k.stride() == pages.v.stride()
        out = torch.empty_like(q) if out is None else out
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse
        arrays, shape = self._arrays, self._shape

        def kernel() -> None:
            for i, last in enumerate(arrays.last_page_len.tolist()):
                rows = slice(int(arrays.qo_indptr[i]), int(arrays.qo_indptr[i + 1]))
                slots = arrays.kv_indices[int(arrays.kv_indptr[i]) : int(arrays.kv_indptr[i + 1])].long().to(q.device)
                keys = max(0, len(slots) - 1) * shape.page_size + last
                k, v = (part[slots].flatten(0, 1)[:keys].double() for part in (pages.k, pages.v))
                out[rows], lse[rows] = self._attend(q[rows].double(), k, v)

        opaque(kernel)
        return out, lse

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last rows of q and k (keys, kv_heads, dim) are one position."""
        shape = self._shape
        group = shape.q_heads // shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->qhk", q, k) * shape.scale
        if shape.softcap is not None:
            logits = torch.tanh(logits / shape.softcap) * shape.softcap
        at = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)
        age = (at[:, None] - torch.arange(k.shape[0], device=q.device))[:, None]
        hidden = (age < 0) if self._causal else torch.zeros_like(age, dtype=torch.bool)
        if shape.window is not None:
            hidden = hidden | (age >= shape.window)
        logits = logits.masked_fill(hidden, -torch.inf)
        return torch.einsum("qhk,khd->qhd", logits.softmax(-1), v), logits.logsumexp(-1) / np.log(2)
