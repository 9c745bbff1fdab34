"""The paged kernels that FlashInferBackend runs on, as one small interface, so that planning can be tried without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from engine.attention.base import LayerSpec
    from engine.attention.gather import LayerPages
    from engine.attention.paged_plan import PagedTables

__all__ = ["AttentionShape", "Kernels", "PagedKernel"]


class AttentionShape(NamedTuple):
    """What distinguishes one planned kernel from another; layers of one shape share a plan.

    window: in tokens, the current one counted, or None.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window: int | None
    softcap: float | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    @classmethod
    def of(cls, layer: LayerSpec, page_size: int, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionShape:
        """The shape of a layer, whose K and V must have one dim."""
        assert layer.k_dim == layer.v_dim, f"K of {layer.k_dim} and V of {layer.v_dim} dims"
        return cls(
            layer.q_heads,
            layer.kv_heads,
            layer.k_dim,
            page_size,
            layer.scale,
            layer.window,
            layer.softcap,
            q_dtype,
            kv_dtype,
        )


class PagedKernel(Protocol):
    """Attention over pages, planned once a step and run by each layer of a shape."""

    def plan(self, tables: PagedTables, shape: AttentionShape) -> None:
        """Prepare for the sequences of a step."""
        ...

    def run(self, q: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        """Attend for q (T, q_heads, head_dim), contiguous; returns as much."""
        ...

    def run_with_lse(
        self, q: torch.Tensor, pages: LayerPages, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and give each query's log2 of the sum of 2 ** its logits in base 2: float32 (T, q_heads).

        out, lse: where to write; rows of q that no planned sequence has are left as they are.
        """
        ...


class Kernels(Protocol):
    """Makes kernels, each with its own plan. Those called fixed keep their arrays in memory that never moves, and take plans
    for a fixed number of sequences, so that a CUDA graph can be captured over them."""

    def prompt(self) -> PagedKernel:
        """Causal attention of several queries a sequence."""
        ...

    def decode(self) -> PagedKernel:
        """Attention of one query a sequence."""
        ...

    def prefix(self) -> PagedKernel:
        """Attention of several queries a sequence, each of which sees all of it."""
        ...

    def fixed_decode(self, rows: int, max_pages: int) -> PagedKernel:
        """`decode` for exactly `rows` sequences with at most `max_pages` pages together."""
        ...

    def fixed_prefix(self, rows: int, groups: int, max_pages: int) -> PagedKernel:
        """`prefix` for exactly `groups` sequences with at most `rows` queries and `max_pages` pages together."""
        ...

    def merge(self, out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
        """Make out and lse, in place, what attention over the keys of both would have given."""
        ...
