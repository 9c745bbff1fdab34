"""`hicache bench tree --pages N`: a large tree beside one of 10,000 pages, a conversation of many turns beside one of few."""

from __future__ import annotations

import gc
import statistics
import sys
import time
import tracemalloc
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicache.page_table import PageTable
from hicache.radix_tree import RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.radix_tree import Node

__all__ = ["Ratio", "compare"]

FEW_PAGES = 10_000
PAGE_SIZE = 16
KEY_BYTES = 16
HISTORIES = (64, 16, 4)
"""Pages of one history, which is a node; those before its last quarter are shared with another one."""

TURNS = (2, 200)
TIMES = 2000


class Ratio(NamedTuple):
    """One quantity of a small subject and of a large one, in the unit that `op` names."""

    shape: str
    op: str
    small: float
    large: float


class _Forest:
    """A tree over a page table with up to `pages` pages of histories, each sharing its front with one other."""

    def __init__(self, pages: int, history: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.tree = RadixTree(PAGE_SIZE, key_bytes=KEY_BYTES)
        self.table = PageTable(pages)
        self.root = self.tree.hold_root(bytes(KEY_BYTES))
        self.token_bytes = 0
        self.front = 3 * history // 4
        self.history = history
        self.keys: list[bytes] = []  # of some
        self._at = 0
        while self.table.capacity - self.table.used >= 2 * history - self.front:
            self._add_pair()

    def _add_pair(self) -> None:
        shared = self._tokens(self.front)
        for _ in range(2):
            key = shared + self._tokens(self.history - self.front)
            self._insert(key)
            if len(self.keys) < TIMES:
                self.keys.append(key)

    def _tokens(self, pages: int) -> bytes:
        return self._rng.integers(0, 150_000, pages * PAGE_SIZE, dtype=np.int32).tobytes()

    def _insert(self, key: bytes) -> None:
        tree = self.tree
        match = tree.match(self.root, key, len(key))
        node = match.node if match.depth == len(match.node.pages) else tree.split(match.node, match.depth)
        new = key[match.pages * tree.page_key_bytes :]
        count = len(new) // tree.page_key_bytes
        node = tree.grow(node, new, self.table.new(count), on_device=True, priority=0)
        node.hashes += bytes(KEY_BYTES * count)
        tree.touch(node, 0)
        self.token_bytes += len(new)

    def match_next(self) -> None:
        """Find a history that is there, in no order that the tree could know."""
        self._at = (self._at + 7919) % len(self.keys)
        key = self.keys[self._at]
        assert self.tree.match(self.root, key, len(key)).pages == self.history

    def evict(self) -> None:
        """Let the page go that is first in order."""
        node = self.tree.device_order.pick(_anyone)
        assert node is not None
        self.table.release(self.tree.truncate(node, 1))


def compare(pages: int) -> Iterator[Ratio]:
    """Measure trees of FEW_PAGES and of `pages` pages, then conversations of few and many turns; yields as they come."""
    for history in HISTORIES:
        shape = f"history-{history}-p{PAGE_SIZE}"
        yield Ratio(shape, "bytes a page", *(_bytes_a_page(count, history) for count in (FEW_PAGES, pages)))
        few, many = (_Forest(count, history) for count in (FEW_PAGES, pages))
        yield Ratio(shape, "match", *_medians(few.match_next, many.match_next))
        yield Ratio(shape, "evict one page", *_medians(few.evict, many.evict))
    short, long = (_Conversation(turns) for turns in TURNS)
    yield Ratio(f"{TURNS[0]} and {TURNS[1]} turns", "match", *_medians(short.match, long.match))


def _bytes_a_page(pages: int, history: int) -> float:
    """Memory of tree and table a page, besides the token ids."""
    _Forest(2 * history, history)  # what is loaded once is not counted
    gc.collect()
    tracemalloc.start()
    try:
        forest = _Forest(pages, history)
        kept = sum(map(sys.getsizeof, forest.keys))
        total, _ = tracemalloc.get_traced_memory()
        return round((total - kept - forest.token_bytes) / forest.table.used, 1)
    finally:
        tracemalloc.stop()


class _Conversation:
    """One history of the same length, committed in as many turns, and matched as a whole."""

    def __init__(self, turns: int, pages: int = 2000) -> None:
        self.tree = RadixTree(PAGE_SIZE)
        self.root = self.tree.hold_root(bytes(KEY_BYTES))
        self.key = np.random.default_rng(2).integers(0, 150_000, pages * PAGE_SIZE, dtype=np.int32).tobytes()
        table, node = PageTable(pages), self.root
        step = len(self.key) // turns
        for at in range(0, len(self.key), step):
            before: Node = node
            node = self.tree.grow(before, self.key[at : at + step], table.new(pages // turns), on_device=True, priority=0)
            self.tree.touch(node, 0)

    def match(self) -> None:
        """Find all of it."""
        assert self.tree.match(self.root, self.key, len(self.key)).device * self.tree.page_key_bytes == len(self.key)


def _anyone(node: Node) -> bool:
    return True


def _medians(small: Callable[[], None], large: Callable[[], None]) -> tuple[float, float]:
    """Median microseconds of two operations, run in turns."""
    gc.collect()
    gc.freeze()  # as the engine does: the tree is no garbage
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(TIMES):
        for run, out in zip((small, large), taken, strict=True):
            start = time.perf_counter()
            run()
            out.append((time.perf_counter() - start) * 1e6)
    gc.unfreeze()
    return round(statistics.median(taken[0]), 2), round(statistics.median(taken[1]), 2)
