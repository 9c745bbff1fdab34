"""What a model's configuration alone says against running it on paged KV: checked before any weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache.errors import ModelRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig

__all__ = ["check_class", "check_config", "resolve_context_length"]

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_config(config: PreTrainedConfig) -> None:
    """Refuse architectures whose state is more than the keys and values of past tokens. Raises ModelRefused."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ModelRefused(f"{config.model_type} is an encoder-decoder; only decoders run on paged KV")
    layer_types = set(getattr(text, "layer_types", None) or ())
    if unknown := sorted(layer_types - KNOWN_LAYER_TYPES):
        raise ModelRefused(
            f"{config.model_type} has layers of type {', '.join(unknown)}; only full and sliding attention run on paged KV"
        )
    if getattr(text, "attention_chunk_size", None) and not layer_types:
        raise ModelRefused(f"{config.model_type} uses chunked attention, which is not supported")
    if getattr(text, "use_bidirectional_attention", None):
        raise ModelRefused(f"{config.model_type} attends in both directions; only causal models run on paged KV")


def check_class(model_class: type[Any]) -> None:
    """Refuse model classes that keep other state or never call the attention function. Raises ModelRefused."""
    if getattr(model_class, "_is_stateful", False):
        raise ModelRefused(f"{model_class.__name__} keeps recurrent state besides KV, which pages don't hold")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelRefused(f"{model_class.__name__} computes attention by itself and can't run on paged KV")


def resolve_context_length(config: PreTrainedConfig, asked: int | None) -> int:
    """Tokens a sequence may have: as asked, or the model's own. Raises ModelRefused.

    RoPE of type longrope or dynamic chooses its frequencies from the longest sequence of the batch, so a neighbour would
    change a request's KV. Up to the length at which the choice is made there is none, so a shorter context pins it: for
    dynamic that is the model's own length, for longrope the original one.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    length = asked or limit
    if not length:
        raise ModelRefused(f"{config.model_type} states no context length; give --context-length")
    if limit and length > limit:
        raise ModelRefused(f"--context-length {length}: the model ends at {limit} tokens")
    for rope in _rope_parameters(text):
        kind = str(rope.get("rope_type", "default"))
        if kind != "longrope" and "dynamic" not in kind:
            continue
        pinned = rope.get("original_max_position_embeddings") if kind == "longrope" else limit
        if not pinned:
            raise ModelRefused(f"RoPE of type {kind} depends on the longest sequence in the batch")
        if length > pinned:
            raise ModelRefused(
                f"RoPE of type {kind} depends on the longest sequence in the batch beyond {pinned} tokens; "
                f"give --context-length {pinned} or less"
            )
    return int(length)


def _rope_parameters(text: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """RoPE settings of the model: one for all layers, or one for each type of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in rope or "rope_theta" in rope:
        yield rope
    else:
        yield from (part for part in rope.values() if isinstance(part, dict))
