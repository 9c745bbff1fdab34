"""Learn a model's attention layers by watching two tokens pass through it.

The shape of a page comes from here, not from the configuration: what a layer really passes is what must be stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.attention.base import LayerSpec
from engine.attention.hook import attending
from hicache.errors import ModelRefused
from hicache.geometry import LayerGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from engine.attention.hook import HookCall

__all__ = ["Probe", "probe"]

TOKENS = 2
HARMLESS = frozenset({"position_ids", "cache_position", "logits_to_keep"})
"""Tensors that models hand to attention and that say nothing which the packed step doesn't."""


class Probe(NamedTuple):
    """Every attention layer in the order of the forward, and the layers of a page (those that write KV)."""

    layers: tuple[LayerSpec, ...]
    pages: tuple[LayerGeometry, ...]


def probe(model: PreTrainedModel) -> Probe:
    """Run two tokens through the model and record its attention calls. Raises ModelRefused."""
    recorder = _Recorder()
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=model.device)
    positions = torch.arange(TOKENS, device=model.device)[None]
    with torch.inference_mode(), attending(recorder):
        try:
            model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False)
        except TypeError as error:
            raise ModelRefused(f"{type(model).__name__} can't run a packed step: {error}") from error
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(recorder.layers) != expected:
        raise ModelRefused(
            f"{type(model).__name__} has {expected} layers and {len(recorder.layers)} of them call the attention function; "
            "the others keep state that pages don't hold"
        )
    return Probe(tuple(recorder.layers), tuple(recorder.pages))


class _Recorder:
    """Answers attention calls with zeros and keeps what they were."""

    def __init__(self) -> None:
        self.layers: list[LayerSpec] = []
        self.pages: list[LayerGeometry] = []
        self._keys: list[torch.Tensor] = []  # of each page layer; a layer that shares passes the very same tensor

    def __call__(self, call: HookCall) -> torch.Tensor:
        self.layers.append(self._spec(call))
        return call.query.new_zeros(1, TOKENS, call.query.shape[1], call.value.shape[-1])

    def _spec(self, call: HookCall) -> LayerSpec:
        index = getattr(call.module, "layer_idx", None)
        if not isinstance(index, int):
            raise ModelRefused(f"{type(call.module).__name__} has no layer index")
        if any(layer.layer_idx == index for layer in self.layers):
            raise ModelRefused(f"layer {index} calls the attention function more than once")
        _check_call(call)
        q_heads, kv_heads, k_dim = call.query.shape[1], call.key.shape[1], call.query.shape[-1]
        pages_of, writes = self._page_layer(call)
        return LayerSpec(
            layer_idx=index,
            pages_of=pages_of,
            writes=writes,
            q_heads=q_heads,
            kv_heads=kv_heads,
            k_dim=k_dim,
            v_dim=call.value.shape[-1],
            scale=float(call.scale) if call.scale is not None else k_dim**-0.5,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks is not None,
        )

    def _page_layer(self, call: HookCall) -> tuple[int, bool]:
        """The page layer a call reads, and whether it writes it."""
        for i, key in enumerate(self._keys):
            if key is call.key:
                return i, False
        if getattr(call.module, "is_kv_shared_layer", False):
            raise ModelRefused(f"layer {call.module.layer_idx} shares the KV of a layer that can't be told")
        self._keys.append(call.key)
        self.pages.append(LayerGeometry(call.key.shape[1], call.key.shape[-1], call.value.shape[-1]))
        return len(self._keys) - 1, True


def _check_call(call: HookCall) -> None:
    """Refuse a call that a paged backend would answer wrongly. Raises ModelRefused."""
    name = type(call.module).__name__
    q, k, v = call.query.shape, call.key.shape, call.value.shape
    if call.mask is not None:
        raise ModelRefused(f"{name} builds its own attention mask")
    if q[0] != 1 or q[2] != TOKENS or k[:3] != v[:3] or k[2] != TOKENS or k[-1] != q[-1] or q[1] % k[1]:
        raise ModelRefused(f"{name} passes queries {tuple(q)}, keys {tuple(k)} and values {tuple(v)}, which can't be paged")
    if not getattr(call.module, "is_causal", True) or call.others.get("is_causal") is False:
        raise ModelRefused(f"{name} is not causal")
    if call.sinks is not None and call.sinks.numel() != q[1]:
        raise ModelRefused(f"{name} passes {call.sinks.numel()} attention sinks for {q[1]} query heads")
    if unknown := _unknown_tensors(call.others):
        raise ModelRefused(f"{name} passes {', '.join(unknown)} to attention, which has no place on paged KV")


def _unknown_tensors(others: Mapping[str, object]) -> Sequence[str]:
    return sorted(key for key, value in others.items() if isinstance(value, torch.Tensor) and key not in HARMLESS)
