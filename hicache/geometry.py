"""The shape of a page: the KV of `page_size` tokens as one run of bytes, the same in every tier.

Layout, in this order: `[layer][k|v][token][kv_head][head_dim]`. Layers may differ in heads and dims; K and V of a layer may
differ in dim. All offsets are in bytes from the start of the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hicache.checks import check_count
from hicache.errors import ConfigError

__all__ = ["DTYPE_BYTES", "LayerGeometry", "PageGeometry"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer that writes KV: `kv_heads` heads of `k_dim` (K) and `v_dim` (V) elements a token."""

    kv_heads: int
    k_dim: int
    v_dim: int

    def __post_init__(self) -> None:
        check_count("the KV heads of a layer", self.kv_heads)
        check_count("the dimension of K", self.k_dim)
        check_count("the dimension of V", self.v_dim, least=0)


@dataclass(frozen=True)
class PageGeometry:
    """A page of `page_size` tokens over `layers`, stored as `dtype` (a key of DTYPE_BYTES)."""

    page_size: int
    dtype: str
    layers: tuple[LayerGeometry, ...]

    def __post_init__(self) -> None:
        check_count("the page size in tokens", self.page_size)
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"KV dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype}")
        if not self.layers:
            raise ConfigError("a page needs at least one layer that writes KV")

    @cached_property
    def itemsize(self) -> int:
        """Bytes an element."""
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of KV a token, all layers."""
        return sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in self.layers) * self.itemsize

    @cached_property
    def page_bytes(self) -> int:
        """Bytes a page."""
        return self.page_size * self.token_bytes

    @cached_property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """(K offset, V offset) of each layer in a page, in bytes."""
        out, at = [], 0
        for layer in self.layers:
            k_bytes = self.page_size * layer.kv_heads * layer.k_dim * self.itemsize
            v_bytes = self.page_size * layer.kv_heads * layer.v_dim * self.itemsize
            out.append((at, at + k_bytes))
            at += k_bytes + v_bytes
        return tuple(out)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where layers begin and end in a page, in bytes: layer i is [bounds[i], bounds[i + 1])."""
        return (*(k for k, _ in self.offsets), self.page_bytes)

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the last one perhaps partly."""
        return -(-tokens // self.page_size)

    def describe(self) -> str:
        """A canonical line that differs whenever two geometries could not share bytes."""
        layers = ",".join(f"{layer.kv_heads}x{layer.k_dim}+{layer.v_dim}" for layer in self.layers)
        return f"page_size={self.page_size};dtype={self.dtype};layers={layers}"
