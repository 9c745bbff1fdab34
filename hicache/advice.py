"""How large tiers must be: the least memory and disk that come near an infinite cache, found by replaying a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache.simulate import Sizes, replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.config import EvictionPolicy
    from hicache.traces import Trace

__all__ = ["Advice", "advise"]

NEAR = 0.95
"""Share of an infinite cache's hits that all tiers together shall reach."""

NEAR_IN_MEMORY = 0.75
"""Share of them that device and host together shall reach."""

PRECISION = 1.1
"""Ratio between two sizes that are not told apart."""


class Advice(NamedTuple):
    """sizes: of device, host and disk, in blocks. hit_share: what they reach together. infinite: what no size exceeds."""

    sizes: Sizes
    hit_share: float
    infinite: float


def advise(trace: Trace, device: int, eviction: EvictionPolicy, each: Callable[[], object] = lambda: None) -> Advice:
    """Find the sizes for a device of at least `device` blocks, and of the longest request. each: called after each replay."""
    infinite = 1.0 - trace.unique_blocks / max(1, trace.blocks)
    known: dict[int, float] = {}

    def share(blocks: int) -> float:
        if blocks not in known:
            known[blocks] = replay(trace, Sizes(blocks), eviction).hit_share
            each()
        return known[blocks]

    device = max(device, *(len(request.blocks) for request in trace.requests))
    memory = _least(NEAR_IN_MEMORY * infinite, device, trace.unique_blocks, share)
    disk = _least(NEAR * infinite, memory, trace.unique_blocks, share)
    sizes = Sizes(device, max(memory - device, device), disk) if disk > device else Sizes(device)
    return Advice(sizes, replay(trace, sizes, eviction).hit_share, infinite)


def _least(goal: float, low: int, high: int, share: Callable[[int], float]) -> int:
    """The smallest size, as exact as PRECISION, whose share of hits reaches `goal`."""
    high = max(low, high)
    if share(low) >= goal:
        return low
    while high > low * PRECISION and high > low + 1:
        middle = max(low + 1, int((low * high) ** 0.5))
        if share(middle) >= goal:
            high = middle
        else:
            low = middle
    return high
