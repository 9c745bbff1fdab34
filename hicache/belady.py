"""Belady's optimum for prefixes: the hits of a cache that knows the future, as a bound for those that don't.

Leaf first, as every policy here: a block goes only after those behind it. That is no further restriction, since whoever uses a
block uses all before it, so a parent's next use is never later than a child's.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (2), 1966.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.traces import Trace

__all__ = ["belady_hits"]


def belady_hits(trace: Trace, capacity: int, longest: int | None = None) -> int:
    """Count the block hits of `capacity` blocks under the optimum. Blocks of a request after the first `longest` are not kept.

    As in the cache itself, the running request's blocks must all fit and stay until it has ended.
    """
    if capacity < 1:
        raise ConfigError(f"a cache needs at least 1 block, not {capacity}")
    longest = min(capacity, longest or capacity)
    due = [0] * (trace.unique_blocks + 1)  # next use of each resident block; 0: not resident
    farthest: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale where `due` says otherwise
    hits = used = 0
    for request, nexts in zip(trace.requests, _next_uses(trace), strict=True):
        blocks = request.blocks[:longest].tolist()
        found = 0
        while found < len(blocks) and due[blocks[found]]:
            found += 1
        hits += found
        used += len(blocks) - found
        for block in blocks:
            due[block] = -1  # pinned
        while used > capacity:
            minus_due, _, block = heapq.heappop(farthest)
            if due[block] == -minus_due:
                due[block] = 0
                used -= 1
        for depth, (block, due_at) in enumerate(zip(blocks, nexts, strict=False)):
            due[block] = due_at
            heapq.heappush(farthest, (-due_at, -depth, block))
    return hits


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each block of each request, the number (from 1) of the next request that uses it; one past the last for none."""
    never = len(trace.requests) + 1
    later = [never] * (trace.unique_blocks + 1)
    out = []
    for number in range(len(trace.requests), 0, -1):
        blocks = trace.requests[number - 1].blocks.tolist()
        out.append([later[block] for block in blocks])
        for block in blocks:
            later[block] = number
    out.reverse()
    return out
