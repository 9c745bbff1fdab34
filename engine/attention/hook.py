"""The function that transformers calls for attention, and how a forward says who answers the call.

transformers keeps attention functions in one registry for the process; that name is all that is global here. Who handles a
call is set for the duration of a forward, in its own thread, by `attending`.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from transformers import AttentionInterface

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["IMPLEMENTATION", "AttentionHandler", "HookCall", "attending"]

IMPLEMENTATION = "hicache"
"""The `attn_implementation` to load a model with. Not registered with the mask interface: masks must come as None."""


class HookCall(NamedTuple):
    """One attention call as transformers makes it: q (1, q_heads, T, k_dim), k and v (1, kv_heads, T, ·), after RoPE and
    before heads are repeated. `others` are the keyword arguments that have no place here."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    others: dict[str, Any]

    @property
    def layer_idx(self) -> int:
        """The module's own index of its layer."""
        index = self.module.layer_idx
        assert isinstance(index, int), f"layer index {index}"
        return index


class AttentionHandler(Protocol):
    """Answers the attention calls of one forward."""

    def __call__(self, call: HookCall) -> torch.Tensor:
        """Return the attention output, (1, T, q_heads, v_dim)."""
        ...


_handler: ContextVar[AttentionHandler | None] = ContextVar("hicache_attention_handler", default=None)


@contextmanager
def attending(handler: AttentionHandler) -> Iterator[None]:
    """Let `handler` answer the attention calls of the forwards inside the block (this thread's only)."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Pass a call to the handler of the running forward. The signature is transformers'."""
    handler = _handler.get()
    assert handler is not None, "the model ran outside a runner's forward"
    assert not dropout, "dropout is for training"
    call = HookCall(module, query, key, value, attention_mask, scaling, sliding_window, softcap, s_aux, others)
    return handler(call), None


AttentionInterface.register(IMPLEMENTATION, _attention)
