"""Copies of many scattered pages by one kernel, which reads or writes page-locked host memory itself. Needs Triton.

Few programs walk over all tiles, so that compute keeps most of the device: the link to the host is the limit, not the cores.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.transfer.io_backend import Move, Part

__all__ = ["BLOCK_WORDS", "KernelBackend", "copy_tiles"]

PROGRAMS, WARPS = 16, 16
BLOCK_WORDS = 2048
"""Words of a tile. 16 programs with 16 KiB each keep 256 KiB under way: more than a link of 60 GB/s holds in 2 µs."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=["tiles_a_page", "tiles"])  # type: ignore[untyped-decorator]
def copy_tiles(  # type: ignore[no-untyped-def]  # Triton gives the types
    src, dst, src_slots, dst_slots, page_words, first_word, words, tiles_a_page, tiles, BLOCK: tl.constexpr
):
    """Copy words [first_word, first_word + words) of each page from its slot in `src` to its slot in `dst`.

    Pages are cut into `tiles_a_page` tiles of BLOCK words; programs take every n-th tile. Slots are int32, offsets int64.
    """
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        page = tile // tiles_a_page
        at = (tile % tiles_a_page) * BLOCK + tl.arange(0, BLOCK)
        source = tl.load(src_slots + page).to(tl.int64) * page_words + first_word
        target = tl.load(dst_slots + page).to(tl.int64) * page_words + first_word
        values = tl.load(src + source + at, mask=at < words)
        tl.store(dst + target + at, values, mask=at < words)


class KernelBackend:
    """One launch a part. Host pools must be page-locked and mapped; slots are sent to the device first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, move: Move, parts: Sequence[Part]) -> Iterator[Part]:
        """Submit one launch a part, in order."""
        slots = self._send(np.stack((move.src_slots, move.dst_slots)))
        for part in parts:
            if len(move.src_slots):
                _launch(move.src, move.dst, slots[0], slots[1], part)
            yield part

    def _send(self, slots: np.ndarray) -> torch.Tensor:
        """Slots on the device, in the order of the current stream; both allocators reuse their memory in that order."""
        sent = torch.from_numpy(slots)
        if self._device.type == "cpu":
            return sent
        return sent.pin_memory().to(self._device, non_blocking=True)


def _launch(src: torch.Tensor, dst: torch.Tensor, src_slots: torch.Tensor, dst_slots: torch.Tensor, part: Part) -> None:
    page_bytes = src.shape[1]
    size = gcd(8, page_bytes, part.start, part.stop, src.data_ptr(), dst.data_ptr())  # the widest word that fits everywhere
    words = (part.stop - part.start) // size
    tiles_a_page = -(-words // BLOCK_WORDS)
    tiles = tiles_a_page * len(src_slots)
    copy_tiles[(min(PROGRAMS, tiles),)](
        src.view(_WORDS[size]),
        dst.view(_WORDS[size]),
        src_slots,
        dst_slots,
        page_bytes // size,
        part.start // size,
        words,
        tiles_a_page,
        tiles,
        BLOCK=BLOCK_WORDS,
        num_warps=WARPS,
    )
