"""Copies by streaming stores move the same bytes as any other, and nothing else."""

from __future__ import annotations

from ctypes.util import find_library
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.transfer import copier, streaming
from hicache.transfer.copier import copy_pages
from hicache.transfer.streaming import LEAST_BYTES, load_streaming

if TYPE_CHECKING:
    from pathlib import Path

stream = load_streaming()
needs_stream = pytest.mark.skipif(stream is None, reason="hicache/transfer/stream.c was not compiled: no C compiler")


def blobs(pages: int, page_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (pages, page_bytes), np.uint8)


@needs_stream
@pytest.mark.parametrize("page_bytes", [1, 16, 63, 64, 4096, 16384, 16385, 3 * 16384 + 80, 46080, 368640])
def test_every_page_arrives_where_it_should_and_the_others_stay(page_bytes: int) -> None:
    src, dst = blobs(23, page_bytes, 1), blobs(17, page_bytes, 2)
    rng = np.random.default_rng(3)
    from_slots, to_slots = (rng.permutation(len(pool))[:11].astype(np.int32) for pool in (src, dst))
    right = dst.copy()
    right[to_slots] = src[from_slots]
    stream(src, from_slots, dst, to_slots)
    assert (dst == right).all()


@needs_stream
def test_pools_need_no_alignment() -> None:
    page_bytes, slots = 16384 + 16, np.arange(5, dtype=np.int32)
    for shift in (1, 8, 16):
        src = blobs(6, page_bytes, 1).reshape(-1)[shift : shift + 5 * page_bytes].reshape(5, -1)
        dst = np.zeros(6 * page_bytes, np.uint8)[shift : shift + 5 * page_bytes].reshape(5, -1)
        stream(src, slots, dst, slots[::-1].copy())
        assert (dst == src[::-1]).all()


@needs_stream
@pytest.mark.parametrize("bad", [-1, 4])
def test_a_slot_beyond_the_pool_is_refused_before_anything_moves(bad: int) -> None:
    src, dst = blobs(4, 64, 1), np.zeros((4, 64), np.uint8)
    good, wrong = np.array([0, 1], np.int32), np.array([0, bad], np.int32)
    for slots in ((wrong, good), (good, wrong)):
        with pytest.raises(IndexError):
            stream(src, slots[0], dst, slots[1])
    assert not dst.any()


@pytest.mark.parametrize("library", ["nothing.so", "empty.so", find_library("c")])
def test_a_library_that_is_not_ours_is_none(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.so").touch()
    origin = library if library.startswith("libc") else str(tmp_path / library)
    monkeypatch.setattr(streaming, "find_spec", lambda name: ModuleSpec(name, None, origin=origin))
    assert load_streaming() is None


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_stream)])
@pytest.mark.parametrize("count", [3, 40])
def test_large_and_small_copies_are_alike_with_and_without_it(
    compiled: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = 1 << 16
    assert 3 * page_bytes < LEAST_BYTES <= 40 * page_bytes
    if not compiled:
        monkeypatch.setattr(copier, "_stream", None)
    src, dst = blobs(64, page_bytes, 1), np.zeros((64, page_bytes), np.uint8)
    from_slots, to_slots = (np.random.default_rng(seed).permutation(64)[:count].astype(np.int32) for seed in (2, 3))
    copy_pages(src, from_slots, dst, to_slots)
    assert (dst[to_slots] == src[from_slots]).all()
