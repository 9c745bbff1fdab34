"""Replays a trace through the cache itself: real tree, page table, slots, reclaim and write policies; no bytes, no waiting.

A block of the trace is a page of one token, its id. Requests run one after the other at their times of arrival; a running
request's path is pinned, as ever. What takes time in a real cache ends at once here.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicache.cache import HiCache
from hicache.config import CacheConfig, PrefetchConfig
from hicache.errors import ConfigError
from hicache.geometry import LayerGeometry, PageGeometry
from hicache.keys import Namespace
from hicache.pools import HostPool
from hicache.simulated import InstantCopier, InstantStoreRunner, KeyStore

if TYPE_CHECKING:
    from hicache.config import EvictionPolicy, WritePolicy
    from hicache.metrics import TierHits
    from hicache.traces import Trace

__all__ = ["Outcome", "Sizes", "replay"]

_BLOCK = PageGeometry(1, "float8_e4m3fn", (LayerGeometry(1, 1, 0),))
_NAMESPACE = Namespace("simulation")
_PREFETCH = PrefetchConfig(policy="wait_complete", threshold_tokens=1, quota=1.0)
_TAIL = np.zeros(1, np.int32)
"""A token after the blocks: a cache computes at least the last one, and a block of the trace may be a hit."""


class Sizes(NamedTuple):
    """Capacity of each tier, in blocks; 0: there is no such tier."""

    device: int
    host: int = 0
    disk: int = 0


class Outcome(NamedTuple):
    """What one replay gave. hits: blocks by tier, of each request. seconds: what the replay took."""

    hits: list[TierHits]
    blocks: int
    disk_written: int
    seconds: float

    @property
    def by_tier(self) -> tuple[int, int, int]:
        """Blocks hit on device, host and disk."""
        device, host, disk = (sum(each) for each in zip(*self.hits, strict=True))
        return device, host, disk

    @property
    def hit_share(self) -> float:
        """Share of all blocks asked for that were hit in some tier."""
        return sum(self.by_tier) / max(1, self.blocks)


class _Clock:
    """The trace's time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def replay(
    trace: Trace,
    sizes: Sizes,
    eviction: EvictionPolicy = "lru",
    write_policy: WritePolicy = "write_through",
    **settings: object,
) -> Outcome:
    """Run every request of `trace` through a fresh cache. settings: further fields of CacheConfig.

    Of a request longer than the device, the front that fits is kept and the rest is missed. Raises ConfigError.
    """
    clock, store = _Clock(), KeyStore(sizes.disk) if sizes.disk else None
    cache = _cache(sizes, eviction, write_policy, clock, store, settings)
    hits = []
    gc.collect()
    gc.freeze()
    started = time.perf_counter()
    try:
        for request in trace.requests:
            clock.now = request.arrival_s
            hits.append(_run(cache, request.blocks[: sizes.device], request.output_tokens))
    finally:
        seconds = time.perf_counter() - started
        gc.unfreeze()
        cache.close()
    return Outcome(hits, trace.blocks, store.written if store is not None else 0, seconds)


def _cache(
    sizes: Sizes,
    eviction: EvictionPolicy,
    write_policy: WritePolicy,
    clock: _Clock,
    store: KeyStore | None,
    settings: dict[str, object],
) -> HiCache:
    if sizes.disk and not sizes.host:
        raise ConfigError("disk blocks need host blocks: pages reach the disk through the host")
    config = CacheConfig(
        device_pages=sizes.device,
        host_pages=sizes.host,
        eviction=eviction,
        write_policy=write_policy,
        prefetch=_PREFETCH,
        **settings,  # type: ignore[arg-type]
    )
    return HiCache(
        config,
        _BLOCK,
        make_copier=InstantCopier if sizes.host else None,
        host=HostPool(sizes.host, _BLOCK.page_bytes) if sizes.host else None,
        store=store,
        clock=clock,
        make_worker=InstantStoreRunner,
    )


def _run(cache: HiCache, blocks: np.ndarray, output_tokens: int) -> TierHits:
    """One request from arrival to end."""
    count = len(blocks)
    lease = cache.open(np.concatenate((blocks, _TAIL)), _NAMESPACE)
    if cache.in_flight:
        cache.poll()
    while not cache.admit(lease, -2):  # neither the token after the blocks nor the next gets a page here
        _step(cache)
    if cache.in_flight:
        cache.poll()
    while not cache.extend(lease, count):
        _step(cache)
    cache.commit(lease, count)
    cache.poll()
    lease.generated_tokens = output_tokens
    cache.release(lease)
    return lease.hits


def _step(cache: HiCache) -> None:
    ended = cache.poll()
    assert ended, "a request that fits waits for nothing but copies"
