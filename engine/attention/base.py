"""What an attention backend does: write this step's KV into pages, and attend over pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from engine.batch import Batch

__all__ = ["AttentionBackend", "LayerCall", "LayerSpec"]


class LayerSpec(NamedTuple):
    """One attention layer, as the probe saw it.

    layer_idx: the module's own. pages_of: the page layer it reads (an index into the geometry's layers); `writes` is False for
    layers that share another layer's KV. q_heads, kv_heads, k_dim, v_dim: of one token.
    window: sliding window in tokens, the current one counted, or None. softcap: logit soft cap or None. scale: of q·k.
    sinks: whether the layer passes attention sinks (one logit a query head, which enters the softmax and nothing else).
    """

    layer_idx: int
    pages_of: int
    writes: bool
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


class LayerCall(NamedTuple):
    """One layer's tensors of a packed step. q (T, q_heads, k_dim), k (T, kv_heads, k_dim), v (T, kv_heads, v_dim);
    sinks (q_heads,) or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Runs attention on page blobs. Used by one thread (the loop's).

    Does not change: pages of positions before a chunk's start, and pages not named by the batch.
    name: what `--attention-backend` calls it.
    """

    name: str

    def arrange(self, batch: Batch) -> tuple[Batch, npt.NDArray[np.int64] | None]:
        """Reorder a batch of decodes as suits this backend. Returns it, and where each chunk went; None if nothing moved."""
        ...

    def plan(self, batch: Batch) -> None:
        """Prepare one step: what all layers need and compute once (indices, plans). Called before the forward."""
        ...

    def attend(self, layer: LayerSpec, call: LayerCall) -> torch.Tensor:
        """Write k and v to the pages of the planned batch (unless the layer shares), attend causally per sequence.

        Returns (T, q_heads, v_dim) in q's dtype.
        """
        ...
