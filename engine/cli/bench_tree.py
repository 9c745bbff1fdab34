"""`hicache bench tree`: the radix tree alone, on shapes whose names and keys are those of a peer's benchmark.

Keys are given as the engine holds them: int32 tokens in a bytes object. Page ids stand for pages; no bytes are moved.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from array import array
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import typer

from engine.cli.bench_tree_size import compare
from hicache.keys import KeyChain
from hicache.radix_tree import RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.radix_tree import Node

__all__ = ["Figure", "measure", "tree"]

CHAINS = (
    ("chain-8k-16n-p16", 8192, 512, 16),
    ("chain-128k-16n-p64", 131072, 8192, 64),
    ("chain-128k-256n-p64", 131072, 512, 64),
)
LEAVES = (1_000, 10_000, 50_000)
ROOT = b"\0" * 16


class Figure(NamedTuple):
    """One measured operation: the median, and the slowest single run, in microseconds."""

    shape: str
    op: str
    us: float
    worst_us: float


class _Bench:
    """A tree with page ids to give away, and insertion as the cache does it."""

    def __init__(self, page_size: int) -> None:
        self.tree = RadixTree(page_size)
        self.root = self.tree.hold_root(ROOT)
        self.page_size = page_size

    def insert(self, key: bytes, pages: array[int], start: Node | None = None, at: int = 0) -> Node:
        """Add what the tree lacks of `key` below `start`; pages are those of the whole key."""
        tree = self.tree
        match = tree.match(start or self.root, key, len(key), at)
        node = match.node if match.depth == len(match.node.pages) else tree.split(match.node, match.depth)
        done = at // tree.page_key_bytes + match.pages
        if done * tree.page_key_bytes < len(key):
            return tree.grow(node, key[done * tree.page_key_bytes :], pages[done:], on_device=True, priority=0)
        return node


def measure(seed: int = 0) -> Iterator[Figure]:
    """Run every shape once; yields figures as they come."""
    rng = np.random.default_rng(seed)
    for shape, tokens, step, page in CHAINS:
        yield from _chain(rng, shape, tokens, step, page, separate=False)
        yield from _chain(rng, f"{shape}-separate", tokens, step, page, separate=True)
    for leaves in LEAVES:
        yield from _evict(leaves)
    yield from _fan_out(rng)
    yield from _fresh(rng)


def _tokens(rng: np.random.Generator, count: int) -> bytes:
    return rng.integers(0, 150_000, count, dtype=np.int32).tobytes()


def _ids(count: int) -> array[int]:
    return array("i", range(count))


def _chain(rng: np.random.Generator, shape: str, tokens: int, step: int, page: int, separate: bool) -> Iterator[Figure]:
    """One long conversation, inserted turn by turn; `separate` keeps every turn a node of its own (as several users would)."""
    bench, key, pages = _Bench(page), _tokens(rng, tokens), _ids(tokens // page)
    tree, node = bench.tree, bench.root
    for end in range(step, tokens + 1, step):
        node = bench.insert(key[: 4 * end], pages[: end // page], node, 4 * (end - step))
        for _ in range(2 if separate else 0):
            tree.pin(node)
    miss = np.int32(200_001).tobytes() + key[4:]
    assert tree.match(bench.root, key, len(key)).device == tokens // page
    yield _figure(shape, "match", lambda: tree.match(bench.root, key, len(key)), 200)
    yield _figure(shape, "reinsert", lambda: bench.insert(key, pages), 200)
    if separate:
        for each in tree.path(node):
            for _ in range(2):
                tree.unpin(each)

    def lock_unlock() -> None:
        tree.pin(node)
        tree.unpin(node)

    yield _figure(shape, "lock_unlock", lock_unlock, 300)
    yield _figure(shape, "miss", lambda: tree.match(bench.root, miss, len(miss)), 300)


def _evict(leaves: int) -> Iterator[Figure]:
    bench = _Bench(16)
    tree = bench.tree
    nodes = [bench.insert(array("i", [i * 7 + 1] + [5] * 15).tobytes(), _ids(1)) for i in range(leaves)]

    def evict() -> None:
        node = tree.device_order.pick(lambda node: True)
        assert node is not None
        tree.truncate(node, 1)

    yield _figure(f"leaves-{leaves}", "evict_one_page", evict, 100)
    order = list(range(200, leaves))
    random.Random(0).shuffle(order)
    for i in order:
        tree.touch(nodes[i], 0)
    yield _figure(f"leaves-{leaves}", "evict_one_page_after_touching_all", evict, 100)


def _fan_out(rng: np.random.Generator) -> Iterator[Figure]:
    bench, prefix = _Bench(16), _tokens(rng, 4096)
    keys, pages = [prefix + _tokens(rng, 1024) for _ in range(2000)], _ids(320)
    todo = iter(keys)
    yield _figure("fanout-2000x1k-after-4k-p16", "insert", lambda: bench.insert(next(todo), pages), len(keys))
    todo = iter(keys)
    yield _figure("fanout-2000x1k-after-4k-p16", "match", lambda: bench.tree.match(bench.root, next(todo), 4 * 5120), len(keys))


def _fresh(rng: np.random.Generator) -> Iterator[Figure]:
    chain, pages = KeyChain("xxh3_128", b"", 64), _ids(2048)
    for shape, hashed in (("fresh-128k-p64", False), ("fresh-128k-p64-hashed", True)):
        run = partial(
            _insert_fresh, _Bench(64), iter([_tokens(rng, 131072) for _ in range(20)]), pages, chain if hashed else None
        )
        yield _figure(shape, "insert", run, 20)


def _insert_fresh(bench: _Bench, keys: Iterator[bytes], pages: array[int], chain: KeyChain | None) -> None:
    key = next(keys)
    node = bench.insert(key, pages)
    if chain is not None:
        node.hashes += b"".join(chain.extend(ROOT, key))


def _figure(shape: str, op: str, run: Callable[[], object], times: int) -> Figure:
    gc.collect()
    gc.freeze()  # as the engine does: the tree is no garbage
    out = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        out.append((time.perf_counter() - start) * 1e6)
    gc.unfreeze()
    return Figure(shape, op, round(statistics.median(out), 2), round(max(out), 2))


def tree(
    pages: Annotated[
        int | None,
        typer.Option(min=20_000, help="Compare a tree of so many pages with one of 10,000 instead: memory, match, evict."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line a figure instead of a table.")] = False,
) -> None:
    """Time the radix tree: match, insert, pin, evict, by shape. Microseconds, medians."""
    if pages is not None:
        _print_sizes(pages, as_json)
        return
    if not as_json:
        print(f"{'shape':<36} {'op':<34} {'median µs':>10} {'worst µs':>10}")
    for figure in measure():
        if as_json:
            print(json.dumps({"subject": "hicache", **figure._asdict()}), flush=True)
        else:
            print(f"{figure.shape:<36} {figure.op:<34} {figure.us:>10.2f} {figure.worst_us:>10.2f}", flush=True)


def _print_sizes(pages: int, as_json: bool) -> None:
    if not as_json:
        print(f"{'shape':<24} {'op':<18} {'small':>10} {'large':>10} {'ratio':>8}")
    for each in compare(pages):
        if as_json:
            print(json.dumps({"subject": "hicache", "pages": pages, **each._asdict()}), flush=True)
        else:
            print(
                f"{each.shape:<24} {each.op:<18} {each.small:>10.2f} {each.large:>10.2f} {each.large / each.small:>8.2f}",
                flush=True,
            )
