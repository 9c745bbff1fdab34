"""FlashInfer's paged wrappers behind the `Kernels` interface. Versions are told apart by signatures, never by number.

All wrappers use the FA2 kernels: they read pages at any stride, mix 16-bit queries with 8-bit keys, and one compiled module a
shape serves prompts, decodes and cascades alike. Decodes run on its tensor-core path for that reason too.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.attention.base import LayerSpec
    from engine.attention.gather import LayerPages
    from engine.attention.kernels import AttentionShape, PagedKernel
    from engine.attention.paged_plan import PagedTables

__all__ = ["FlashInferKernels", "unsupported"]

WORKSPACE_BYTES = 384 << 20
"""Partial results of contexts that are split between multiprocessors; one buffer, since kernels run one after the other."""

HEAD_DIMS = frozenset({64, 128, 256})
"""Head dims that the FA2 kernels of every supported version are built for."""

QUERY_DTYPES = frozenset({torch.float16, torch.bfloat16})
KV_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})


def unsupported(layers: Sequence[LayerSpec], dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why FlashInfer can't run these layers, or None if it can."""
    if dtype not in QUERY_DTYPES:
        return f"it computes in float16 or bfloat16, not {_name(dtype)}"
    if kv_dtype not in KV_DTYPES or (kv_dtype.itemsize == 2 and kv_dtype != dtype):
        return f"it doesn't read {_name(kv_dtype)} KV with {_name(dtype)} queries"
    for layer in layers:
        if layer.k_dim != layer.v_dim:
            return f"layer {layer.layer_idx} has keys of {layer.k_dim} and values of {layer.v_dim} dims"
        if layer.k_dim not in HEAD_DIMS:
            return f"layer {layer.layer_idx} has a head dim of {layer.k_dim}"
    return None


class FlashInferKernels:
    """Makes wrappers on one device. Raises ImportError if FlashInfer is not installed."""

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        self._flashinfer: Any = flashinfer
        self._device = device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # zero for its first use

    def prompt(self) -> PagedKernel:
        """Causal attention of several queries a sequence."""
        return _Prefill(self._prefill(), causal=True)

    def prefix(self) -> PagedKernel:
        """Attention of several queries a sequence, each of which sees all of it."""
        return _Prefill(self._prefill(), causal=False)

    def decode(self) -> PagedKernel:
        """Attention of one query a sequence."""
        return _Decode(self._decode())

    def fixed_decode(self, rows: int, max_pages: int) -> PagedKernel:
        """`decode` for exactly `rows` sequences with at most `max_pages` pages together."""
        return _Decode(
            self._decode(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self._ints(rows + 1),
                paged_kv_indices_buffer=self._ints(max_pages),
                paged_kv_last_page_len_buffer=self._ints(rows),
            )
        )

    def fixed_prefix(self, rows: int, groups: int, max_pages: int) -> PagedKernel:
        """`prefix` for exactly `groups` sequences with at most `rows` queries and `max_pages` pages together.

        The first plan must have all `rows` queries: from it some versions learn how many there can be.
        """
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        known = inspect.signature(wrapper).parameters
        capacity = {"max_total_num_rows": rows} if "max_total_num_rows" in known else {}
        return _Prefill(
            self._prefill(
                use_cuda_graph=True,
                qo_indptr_buf=self._ints(groups + 1),
                paged_kv_indptr_buf=self._ints(groups + 1),
                paged_kv_indices_buf=self._ints(max_pages),
                paged_kv_last_page_len_buf=self._ints(groups),
                **capacity,
            ),
            causal=False,
        )

    def merge(self, out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
        """Make out and lse, in place, what attention over the keys of both would have given."""
        self._flashinfer.merge_state_in_place(out, lse, other, other_lse)

    def _prefill(self, **fixed: Any) -> Any:
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2", **fixed)

    def _decode(self, **fixed: Any) -> Any:
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True, backend="fa2", **fixed
        )

    def _ints(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)


class _Wrapped:
    """What both kinds of wrappers have in common."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def run(self, q: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        """Attend for q (T, q_heads, head_dim), contiguous; returns as much."""
        out: torch.Tensor = self._wrapper.run(q, (pages.k, pages.v))
        return out

    def run_with_lse(
        self, q: torch.Tensor, pages: LayerPages, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and give each query's log-sum-exp in base 2."""
        both: tuple[torch.Tensor, torch.Tensor] = self._wrapper.run(q, (pages.k, pages.v), out=out, lse=lse, return_lse=True)
        return both


class _Prefill(_Wrapped):
    """Several queries a sequence."""

    def __init__(self, wrapper: Any, *, causal: bool) -> None:
        super().__init__(wrapper)
        self._causal = causal

    def plan(self, tables: PagedTables, shape: AttentionShape) -> None:
        """Prepare for the sequences of a step."""
        self._wrapper.plan(
            torch.from_numpy(tables.qo_indptr),
            *_pages_of(tables),
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=self._causal,
            **_arithmetic(shape),
        )


class _Decode(_Wrapped):
    """One query a sequence."""

    def plan(self, tables: PagedTables, shape: AttentionShape) -> None:
        """Prepare for the sequences of a step."""
        self._wrapper.plan(
            *_pages_of(tables), shape.q_heads, shape.kv_heads, shape.head_dim, shape.page_size, **_arithmetic(shape)
        )


def _pages_of(tables: PagedTables) -> tuple[torch.Tensor, ...]:
    """indptr, indices and lengths of the last pages, in host memory: planning reads them there, and copies them itself."""
    return tuple(torch.from_numpy(part) for part in (tables.kv_indptr, tables.kv_indices, tables.last_page_len))


def _arithmetic(shape: AttentionShape) -> dict[str, Any]:
    """Keyword arguments of `plan`. FlashInfer's window counts the tokens to the left of the current one."""
    return {
        "sm_scale": shape.scale,
        "window_left": -1 if shape.window is None else shape.window - 1,
        "logits_soft_cap": shape.softcap,
        "q_data_type": shape.q_dtype,
        "kv_data_type": shape.kv_dtype,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
