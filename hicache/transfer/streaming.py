"""Large copies between pools in CPU memory by streaming stores, where `stream.c` could be compiled at installation."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Blobs = npt.NDArray[np.uint8]
    Ints = npt.NDArray[np.int32]

__all__ = ["LEAST_BYTES", "load_streaming"]

LEAST_BYTES = 2 << 20
"""Smaller copies go through the processor's caches, where their bytes may be read again before long."""


def load_streaming() -> Callable[[Blobs, Ints, Blobs, Ints], None] | None:
    """The compiled copy, `copy(src_pool, src, dst_pool, dst)`; None if there is none on this machine.

    Pools are contiguous, (pages, page_bytes), slots int32 and within them. Other threads run meanwhile. Any thread.
    """
    spec = find_spec("hicache.transfer._stream")
    if spec is None or spec.origin is None:
        return None
    try:
        stream = ctypes.CDLL(spec.origin).hicache_stream_pages
    except (OSError, AttributeError):  # made for another machine, or from another source
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    stream.argtypes, stream.restype = (pointer, pointer, pointer, pointer, size, size), None

    def copy(src_pool: Blobs, src: Ints, dst_pool: Blobs, dst: Ints) -> None:
        src, dst = np.ascontiguousarray(src, np.int32), np.ascontiguousarray(dst, np.int32)
        assert src_pool.flags.c_contiguous and dst_pool.flags.c_contiguous  # noqa: PT018
        assert len(src) == len(dst), "a page goes from one slot to one slot"
        for slots, pool in ((src, src_pool), (dst, dst_pool)):
            if len(slots) and not (slots.min() >= 0 and slots.max() < len(pool)):
                raise IndexError(f"a slot beyond a pool of {len(pool)} pages")
        stream(dst_pool.ctypes.data, dst.ctypes.data, src_pool.ctypes.data, src.ctypes.data, len(src), src_pool.shape[1])

    return copy
