"""The shape of a page in bytes."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.geometry import DTYPE_BYTES, LayerGeometry, PageGeometry

MIXED = PageGeometry(4, "bfloat16", (LayerGeometry(2, 8, 8), LayerGeometry(1, 24, 16)))


def test_bytes_of_layers_that_differ() -> None:
    assert MIXED.token_bytes == (2 * 16 + 40) * 2
    assert MIXED.page_bytes == 4 * MIXED.token_bytes


def test_offsets_follow_layer_then_k_then_v() -> None:
    assert MIXED.offsets == ((0, 128), (256, 256 + 192))
    last_v = 4 * 1 * 16 * 2
    assert MIXED.offsets[-1][1] + last_v == MIXED.page_bytes


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_that_hold_tokens(tokens: int, pages: int) -> None:
    assert MIXED.pages(tokens) == pages


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_has_its_size(dtype: str) -> None:
    assert PageGeometry(1, dtype, (LayerGeometry(1, 1, 1),)).page_bytes == 2 * DTYPE_BYTES[dtype]


def test_description_differs_when_bytes_cannot_be_shared() -> None:
    layer = LayerGeometry(2, 8, 8)
    others = [
        PageGeometry(8, "bfloat16", MIXED.layers),
        PageGeometry(4, "float16", MIXED.layers),
        PageGeometry(4, "bfloat16", MIXED.layers[::-1]),
        PageGeometry(4, "bfloat16", (layer,)),
        PageGeometry(4, "bfloat16", (layer, layer)),
        PageGeometry(4, "bfloat16", (LayerGeometry(2, 8, 16), LayerGeometry(1, 24, 16))),
    ]
    lines = {geometry.describe() for geometry in (MIXED, *others)}
    assert len(lines) == 1 + len(others)


@pytest.mark.parametrize(
    ("page_size", "dtype", "layers", "why"),
    [
        (0, "float32", MIXED.layers, "page size"),
        (1, "int3", MIXED.layers, "KV dtype"),
        (1, "float32", (), "at least one layer"),
    ],
)
def test_impossible_geometry_is_refused(page_size: int, dtype: str, layers: tuple[LayerGeometry, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PageGeometry(page_size, dtype, layers)


@pytest.mark.parametrize(
    ("layer", "why"), [((0, 8, 8), "KV heads"), ((2, 0, 8), "dimension of K"), ((2, 8, -1), "of V"), ((1.5, 8, 8), "whole")]
)
def test_impossible_layer_is_refused(layer: tuple[int, int, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LayerGeometry(*layer)
