"""How pages move between a device pool and a host pool on one stream: runs of neighbours, a kernel, or what is cheaper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from hicache.transfer.copier import runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    import torch

    Ints = npt.NDArray[np.int32]

__all__ = ["AutoBackend", "Costs", "DirectBackend", "IoBackend", "IoBackendName", "Move", "Part", "split_layers"]

IoBackendName = Literal["auto", "direct", "kernel"]

KERNEL_PRICE = 1.1
"""A kernel takes the compute's cores while it copies, the copy engines do not: it must be this much quicker to be chosen."""


class Part(NamedTuple):
    """Layers [first, end) of a page, which are its bytes [start, stop)."""

    first: int
    end: int
    start: int
    stop: int


class Move(NamedTuple):
    """Page i goes from row src_slots[i] of `src` to row dst_slots[i] of `dst`; pools are uint8 (pages, page_bytes)."""

    src: torch.Tensor
    src_slots: Ints
    dst: torch.Tensor
    dst_slots: Ints

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return len(self.src_slots) * self.src.shape[1]

    @property
    def num_runs(self) -> int:
        """Stretches in which both sides are neighbours."""
        if not len(self.src_slots):
            return 0
        return 1 + int(((np.diff(self.src_slots) != 1) | (np.diff(self.dst_slots) != 1)).sum())

    def check(self) -> None:
        """Raise IndexError for a slot outside its pool: on a device nothing else would notice."""
        for slots, pool in ((self.src_slots, self.src), (self.dst_slots, self.dst)):
            if len(slots) and not (slots.min() >= 0 and slots.max() < len(pool)):
                raise IndexError(f"slots {slots.min()} to {slots.max()} of a pool of {len(pool)} pages")


class IoBackend(Protocol):
    """Submits copies to the current stream. Knows nothing of order between streams; used by one thread at a time."""

    def copy(self, move: Move, parts: Sequence[Part]) -> Iterator[Part]:
        """Submit the copies of `parts`, which together are whole pages; yields what was submitted after each step.

        One that can't copy a part of a page yields all of it at once. `move` has been checked.
        """
        ...


def split_layers(bounds: Sequence[int], pages: int, least_bytes: int) -> list[Part]:
    """Cut pages between layers (layer i is bytes [bounds[i], bounds[i + 1])) into parts of at least `least_bytes` over `pages`.

    The last part may be smaller.
    """
    parts, first, last = [], 0, len(bounds) - 1
    for end in range(1, last + 1):
        if end == last or (bounds[end] - bounds[first]) * pages >= least_bytes:
            parts.append(Part(first, end, bounds[first], bounds[end]))
            first = end
    return parts


class DirectBackend:
    """Neighbours in one copy of whole pages, by the device's copy engines.

    chunk_pages: no copy crosses a multiple of so many host slots, since each such stretch was page-locked by itself.
    """

    def __init__(self, chunk_pages: int) -> None:
        self._chunk_pages = chunk_pages

    def copy(self, move: Move, parts: Sequence[Part]) -> Iterator[Part]:
        """Submit one copy a run."""
        to_host = move.dst.device.type == "cpu"
        for src, dst, count in runs(move.src_slots, move.dst_slots):
            done = 0
            while done < count:
                host_slot = (dst if to_host else src) + done
                n = min(count - done, self._chunk_pages - host_slot % self._chunk_pages)
                a, b = src + done, dst + done
                move.dst[b : b + n].copy_(move.src[a : a + n], non_blocking=True)
                done += n
        yield Part(parts[0].first, parts[-1].end, parts[0].start, parts[-1].stop)


class Costs(NamedTuple):
    """What copies of one direction cost, in seconds: `run_s` a run and `direct_byte_s` a byte, or `kernel_byte_s` a byte."""

    run_s: float
    direct_byte_s: float
    kernel_byte_s: float

    def prefer_kernel(self, num_runs: int, num_bytes: int) -> bool:
        """Whether a kernel is worth its price for a copy of so many runs and bytes."""
        return num_runs * self.run_s + num_bytes * self.direct_byte_s > KERNEL_PRICE * num_bytes * self.kernel_byte_s

    def describe(self, page_bytes: int) -> str:
        """One line in the units people compare."""
        scattered_s = self.run_s / page_bytes + self.direct_byte_s
        rates = (1 / max(1e-15, byte_s) / 2**30 for byte_s in (self.direct_byte_s, scattered_s, self.kernel_byte_s))
        return "direct {:.1f} GiB/s, page by page {:.1f} GiB/s, kernel {:.1f} GiB/s".format(*rates)


class AutoBackend:
    """Takes for each copy what `costs`, measured at start, say is cheaper."""

    def __init__(self, direct: IoBackend, kernel: IoBackend, costs: Costs) -> None:
        self._direct = direct
        self._kernel = kernel
        self.costs = costs

    def copy(self, move: Move, parts: Sequence[Part]) -> Iterator[Part]:
        """Submit the copies to whichever is cheaper."""
        chosen = self._kernel if self.costs.prefer_kernel(move.num_runs, move.num_bytes) else self._direct
        return chosen.copy(move, parts)
