"""The cache: what an engine calls. Composes tree, table, pools, policies and transfers; does nothing itself that they can do.

A request's way:

    lease = cache.open(tokens, namespace)      look-up; a prefetch from disk may start
    cache.ready(lease)                         whether its prefetch policy lets it run now
    cache.admit(lease, reserve_pages)          pin what is found, start loading it back
    lease.state is LeaseState.ACTIVE           (after `poll`) lease.cached tokens need no computing
    cache.meet(lease, tokens)                  how far to compute, while more of the hit may be coming from disk
    cache.extend(lease, tokens)                own slots for positions [0, tokens)
    cache.commit(lease, tokens)                positions [0, tokens) are computed: full pages become shared
    cache.release(lease)                       on every exit, in any state

and `cache.poll()` at every step, prefill or decode. All of it on one thread, the scheduler's.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client.core import GaugeMetricFamily

from hicache.backup import Backup
from hicache.errors import CacheClosed, ConfigError, LoadFailed
from hicache.gauges import pool_gauges
from hicache.hints import Hints
from hicache.keys import KeyChain
from hicache.lease import Lease, LeaseState
from hicache.metrics import CacheMetrics, TierHits
from hicache.moves import Mover
from hicache.page_table import NOWHERE
from hicache.prefetcher import Prefetcher
from hicache.reclaim import Reclaimer
from hicache.sharing import Sharing
from hicache.tiers import Tiers
from hicache.transfer.operation import OpState
from hicache.transfer.store_worker import StoreWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    from prometheus_client import Metric

    from hicache.back import Back
    from hicache.config import CacheConfig
    from hicache.events import PageEvents
    from hicache.geometry import PageGeometry
    from hicache.keys import Namespace
    from hicache.pools import HostPool
    from hicache.radix_tree import Match, Node
    from hicache.transfer.operation import Copier, CopyOp, LayerGate, Operation, StoreRunner
    from storage.base import PageStore

    Ids = npt.NDArray[np.int32]

__all__ = ["HiCache"]


def _worker_of(
    make_worker: Callable[[PageStore, HostPool, SimpleQueue[Operation]], StoreRunner],
    host: HostPool | None,
    completions: SimpleQueue[Operation],
    store: PageStore,
) -> StoreRunner:
    assert host is not None, "a store needs a host pool"
    return make_worker(store, host, completions)


class HiCache:
    """A hierarchical KV cache over a device pool, an optional host pool and an optional page store.

    The pools' memory belongs to the caller's `make_copier`; the store stays the caller's to close, after the cache.
    """

    def __init__(
        self,
        config: CacheConfig,
        geometry: PageGeometry,
        *,
        make_copier: Callable[[SimpleQueue[Operation]], Copier] | None = None,
        host: HostPool | None = None,
        store: PageStore | None = None,
        secret: bytes = b"",
        labels: Mapping[str, str] | None = None,
        events: PageEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_worker: Callable[[PageStore, HostPool, SimpleQueue[Operation]], StoreRunner] = StoreWorker,
    ) -> None:
        """Build an empty cache. With host pages, `make_copier` (given the completion queue) and `host` are needed.

        secret: seeds the key chain; a store's own secret is used where there is one. labels: readable facts about the model
        that a store keeps beside its namespaces. events: is told where pages are; the caller takes them after each step.
        """
        completions: SimpleQueue[Operation] = SimpleQueue()
        self.config = config
        self.geometry = geometry
        self.metrics = CacheMetrics(self._gauges, clock)
        chain = KeyChain(config.hash_algo, store.secret if store is not None else secret, geometry.page_size)
        self._t = Tiers(
            config=config,
            geometry=geometry,
            chain=chain,
            metrics=self.metrics,
            copier=make_copier(completions) if make_copier is not None else None,
            completions=completions,
            worker=make_worker(store, host, completions) if store is not None and host is not None else None,
            clock=clock,
            events=events,
        )
        assert config.host_pages == 0 or self._t.copier is not None, "a host pool needs a copier"
        self._mover = Mover(self._t)
        self._reclaimer = Reclaimer(self._t, self._mover)
        self._backup = Backup(self._t, self._mover, self._reclaimer)
        self._sharing = Sharing(self._t, self._backup)
        self._prefetcher = Prefetcher(self._t, self._mover, self._reclaimer)
        self.hints = Hints(self._t, self.open, self.release)
        self._labels = {"page_size": str(geometry.page_size), "dtype": geometry.dtype, **(labels or {})}
        self._make_worker = partial(_worker_of, make_worker, host, completions)
        self._host = host
        self._closed = False

    # ---- a request

    def open(
        self, tokens: Sequence[int] | Ids, namespace: Namespace, priority: int = 0, max_cached_tokens: int = sys.maxsize
    ) -> Lease:
        """Look a prompt up and start what can be started before it is admitted. `tokens` is copied.

        max_cached_tokens: reuse no more than this many leading tokens.
        """
        if self._closed:
            raise CacheClosed("the cache is closed")
        root = self._t.hold_root(namespace, self._labels)
        data = bytearray(np.asarray(tokens, np.int32).tobytes())
        lease = Lease(root=root, tokens=data, prompt_tokens=len(tokens), priority=priority, max_cached_tokens=max_cached_tokens)
        if self.config.reuse:
            match = self._match(lease)
            behind, match = match.node, match._replace(node=self._sharing.ends_at(match))  # what lies behind was not used
            self._t.tree.touch(match.node, priority, group=self._sight(lease, behind if behind is not match.node else None))
            lease.found = (match.device, match.pages - match.device, 0)
            self._prefetcher.begin(lease, match, self._limit_pages(lease))
        return lease

    def ready(self, lease: Lease) -> bool:
        """Whether the prefetch policy lets a waiting lease be admitted now."""
        prefetch = lease.prefetch
        if prefetch is None or prefetch.finished or prefetch.back is not None:
            return True
        return self._t.clock() >= prefetch.deadline_s

    def cached_pages(self, lease: Lease) -> int:
        """Pages of a waiting lease's tokens that are in memory now. Counts as no use of them."""
        return self._match(lease).pages if self.config.reuse else 0

    def awaits_load(self, lease: Lease) -> bool:
        """Whether pages that a waiting lease would reuse are just being loaded back for another request."""
        return self.config.reuse and self._on_their_way(self._match(lease))

    def room_pages(self) -> int:
        """Device pages that are free or could be made free: all but those of running requests."""
        t = self._t
        return t.device.free + t.tree.device_pages - t.tree.pinned_device_pages

    def admit(self, lease: Lease, reserve_pages: int) -> bool:
        """Pin what the tree has of the prompt and start loading it back; False: not now, ask again after `poll`.

        reserve_pages: device pages that must remain for others once this lease has all pages of its tokens.
        Pages on their way for another request are waited for, not loaded twice.
        """
        assert lease.state is LeaseState.WAITING, f"a lease is admitted once, and this one is {lease.state.name}"
        assert self._t.tree.holds(lease.root), "a lease is admitted on the cache that it was opened on"
        t = self._t
        match = self._match(lease) if self.config.reuse else None
        if match is not None and self._on_their_way(match):
            return False
        found = match.pages if match is not None else 0
        if match is not None and not t.load_pays(match):
            match = t.tree.match(lease.root, lease.tokens, match.device * t.tree.page_key_bytes)
        node = self._pin_match(match) if match is not None else lease.root
        pages, device = (match.pages, match.device) if match is not None else (0, 0)
        own = self.geometry.pages(lease.num_tokens + 1) - device
        while self.room_pages() < own + reserve_pages and self.hints.give_up():
            pass
        if self.room_pages() < own + reserve_pages or not self._reclaimer.device_room(pages - device):
            t.tree.unpin(node)
            return False
        if found > pages:
            self.metrics.recomputed_tokens.labels("slow_host").inc((found - pages) * self.geometry.page_size)
        lease.node = node
        lease.reused = 0
        t.admitted += 1
        self._prefetcher.admitted(lease)
        self._bring_up(lease, device)
        return True

    def start(self, lease: Lease) -> LayerGate | None:
        """Let a lease compute while its pages are still being loaded back, if layers can wait for them one by one.

        Returns the gate that every layer must pass before it reads the pages for the first time; None: not now, or not here.
        The lease is ACTIVE then, and shares nothing until its load has been settled.
        """
        op = lease.load
        if lease.state is not LeaseState.LOADING or op is None or op.gate is None:
            return None
        lease.add_slots(op.dst)
        lease.shared += len(op.dst)
        lease.reused += len(op.dst)
        self._activate(lease)
        return op.gate

    def meet(self, lease: Lease, tokens: int) -> int:
        """Up to which token an active lease whose [0, tokens) are computed goes on; ask again when that is reached.

        That is as far as it likes, unless the back of its hit is still being read (`hicache.prefetcher`). When front and back
        have met, the back is loaded: the lease may be LOADING afterwards, or `cached` may have grown.
        """
        prefetch = lease.prefetch
        if prefetch is None:
            return sys.maxsize
        back = prefetch.back
        assert back is not None, "a running lease waits for nothing else"
        if lease.shared >= back.end or (prefetch.finished and not len(back)):
            self._prefetcher.stop(lease)
            self._used(lease)
            return sys.maxsize
        if lease.shared >= back.first and lease.load is None and self._join(lease, back):
            return sys.maxsize if lease.state is LeaseState.ACTIVE else 0
        size = self.geometry.page_size
        return self._prefetcher.front_end(lease, max(lease.shared, tokens // size)) * size

    def extend(self, lease: Lease, tokens: int) -> bool:
        """Own device slots for positions [0, tokens); False: no room now (nothing was taken)."""
        assert lease.state is LeaseState.ACTIVE, f"only an active lease has slots, and this one is {lease.state.name}"
        need = self.geometry.pages(tokens) - lease.num_slots
        if need <= 0:
            return True
        while not self._reclaimer.device_room(need):
            if self._reclaimer.pending or not self.hints.give_up():
                return False
        lease.add_slots(self._t.device.take(need))
        return True

    def commit(self, lease: Lease, tokens: int) -> None:
        """Positions [0, tokens) are computed: share their full pages through the tree, and back them up as the policy says.

        What a lease that was started early computes is shared by the first commit after its load has been settled. Raises
        LoadFailed if that load failed.
        """
        full = tokens // self.geometry.page_size
        assert lease.state is LeaseState.ACTIVE, f"only an active lease is computed, and this one is {lease.state.name}"
        assert lease.num_tokens >= tokens, "tokens are appended before they are committed"
        assert lease.num_slots >= full, "positions have slots, which `extend` takes, before they are committed"
        if lease.load is not None:
            self._mover.drain()
        if lease.load is not None:
            if lease.load.state is OpState.FAILED:
                raise LoadFailed(f"{len(lease.load.ids)} pages were not loaded back: {lease.load.error}")
            return
        if self.config.reuse and full > lease.shared:
            self._sharing.share(lease, full)

    def release(self, lease: Lease) -> None:
        """End a lease, in any state; shared pages stay in the cache, own ones are freed. Idempotent."""
        if lease.state is not LeaseState.RELEASED:
            assert self._t.tree.holds(lease.root), "a lease is released on the cache that it was opened on"
            self.suspend(lease)
            self._t.tree.drop_root(lease.root)
            lease.state = LeaseState.RELEASED

    def suspend(self, lease: Lease) -> None:
        """Take a lease off the device: what is committed stays in the cache; it may be admitted again later."""
        t = self._t
        if lease.prefetch is not None and lease.state is LeaseState.ACTIVE:
            self._count(lease)
        self._prefetcher.stop(lease)
        t.admitted -= lease.state is not LeaseState.WAITING
        if lease.node is not None:
            if t.ghosts is not None:
                lease.node.device.ends = lease.node.host.ends = True
                if lease.visit is not None:
                    lease.group = t.ghosts.answered(lease.visit, lease.generated_tokens)
            t.tree.touch(lease.node, lease.priority, hits=0, group=lease.group)
            t.tree.unpin(lease.node)
            lease.node = None
        t.device.give(lease.cut_slots(lease.shared))
        lease.num_slots = lease.shared = 0
        lease.load = None
        lease.state = LeaseState.WAITING

    def observe_compute(self, chunks: list[tuple[int, int]], seconds: float) -> None:
        """Tell the planner what a step cost: `chunks` of (first position, tokens), computed in `seconds`."""
        self._t.planner.observe_compute(chunks, seconds)

    # ---- every step

    def poll(self) -> int:
        """Settle operations that have ended and make room ahead of need; returns how many ended."""
        ended = self._mover.drain()
        self.hints.tick()
        self._reclaimer.in_background()
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Block until an operation ends or the time is up, without settling it; False if nothing is in flight."""
        t = self._t
        if not t.in_flight:
            return False
        self._mover.wait(timeout_s)
        return True

    @property
    def in_flight(self) -> int:
        """Operations that have not been settled."""
        return self._t.in_flight

    @property
    def room_is_coming(self) -> bool:
        """Whether copies in flight will make device room, so that an `extend` that failed may succeed later."""
        return self._reclaimer.pending

    # ---- the whole cache

    def flush(self) -> int:
        """Forget every page in memory that nobody uses; returns how many. The store keeps its records."""
        t, count = self._t, 0
        table = t.table
        self.hints.clear()
        while (node := t.tree.host_order.pick(lambda node: not table.host_busy[node.pages[-1]])) is not None:
            idle = t.idle_tail(table.host_busy, node.pages, len(node.pages), node.host_len)
            t.forget(node, idle)
            count += idle
        while (node := t.tree.device_order.pick(self._is_bare)) is not None:
            idle = t.idle_tail(table.host_busy, node.pages, len(node.pages), len(node.pages))
            idle = t.idle_tail(table.device_busy, node.pages, len(node.pages), idle)
            t.forget(node, idle)
            count += idle
        return count

    def persist(self, timeout_s: float) -> None:
        """Write to the store what it does not have, parents first, for at most `timeout_s`."""
        t = self._t
        if t.worker is None:
            return
        deadline_s = t.clock() + timeout_s
        for node in list(t.tree.nodes()):
            # A node may have left the tree to make room for another's copies.
            while node.parent is not None and t.clock() < deadline_s and not self._backup.to_store(node):
                if not self.wait(0.05):
                    break
                self._mover.drain()
        while t.in_flight and t.clock() < deadline_s:
            self.wait(0.05)
            self._mover.drain()

    # ---- another store

    def check_attachable(self) -> None:
        """Raise ConfigError if `attach` can't work now."""
        t = self._t
        if self.config.host_pages == 0:
            raise ConfigError("a storage backend needs a host pool; start with --enable-hierarchical-cache")
        if t.worker is not None:
            raise ConfigError("a storage backend is attached already")
        if t.in_flight > t.copying:
            raise ConfigError("operations of the last storage backend have not ended yet; try again")

    def attach(self, store: PageStore) -> None:
        """Put a store below the host, on a running cache. The store stays the caller's to close. Raises ConfigError."""
        self.check_attachable()
        t = self._t
        t.rekey(KeyChain(self.config.hash_algo, store.secret, self.geometry.page_size))
        t.worker = self._make_worker(store)

    def detach(self) -> StoreRunner:
        """Go on without the store; the caller closes the returned worker (which may block), then the store.

        Operations in flight end as they would, but pages that land are not taken. Raises ConfigError without a store.
        """
        worker, self._t.worker = self._t.worker, None
        if worker is None:
            raise ConfigError("no storage backend is attached")
        return worker

    def forget_stored(self) -> None:
        """Take it that the store has none of the pages in memory (it was cleared)."""
        self._t.forget_stored()

    def stats(self) -> dict[str, object]:
        """Every metric by name, as plain numbers, for `/cache/stats`."""
        return self.metrics.as_numbers()

    def close(self) -> None:
        """End workers and settle what they did. Pools and store remain the caller's. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.hints.clear()
        if self._t.copier is not None:
            self._t.copier.close()
        self._mover.drain()
        worker, self._t.worker = self._t.worker, None  # a probe that ends now starts no read
        if worker is not None:
            worker.close()
        self._mover.drain()

    # ---- helpers

    def _sight(self, lease: Lease, behind: Node | None) -> int:
        """Let the ghosts know of a request; returns the group of what the tree has of its path. behind: cut off from that."""
        t = self._t
        if t.ghosts is None:
            return 0
        t.tree.now = int(t.clock() * 1e6)
        sighting = t.ghosts.see(lease.root.hashes, lease.tokens, max(0, self._limit_pages(lease)), t.tree.now)
        lease.group = sighting.group
        lease.counts = sighting.counts
        lease.visit = sighting.visit
        if behind is not None and not behind.children and sighting.abandoned is not None:
            t.tree.regroup(behind, sighting.abandoned)
        return sighting.group if sighting.shared is None else sighting.shared

    def _limit_pages(self, lease: Lease) -> int:
        """Pages that may be reused: at least the last token is computed, since its logits are needed."""
        return min(lease.num_tokens - 1, lease.max_cached_tokens) // self.geometry.page_size

    def _match(self, lease: Lease) -> Match:
        tree = self._t.tree
        return tree.match(lease.root, lease.tokens, self._limit_pages(lease) * tree.page_key_bytes)

    def _pin_match(self, match: Match) -> Node:
        node = self._sharing.ends_at(match)
        self._t.tree.pin(node)
        return node

    def _on_their_way(self, match: Match) -> bool:
        if match.device == match.pages:
            return False
        ids = self._t.tree.path_ids(match.node)
        return bool(self._t.table.loading.take(ids[match.device : match.pages]).any())

    def _join(self, lease: Lease, back: Back) -> bool:
        """Go on with the back of a hit, which the front has reached; False: not now."""
        t = self._t
        match = t.tree.match(lease.root, lease.tokens, back.end * t.tree.page_key_bytes)
        own = lease.num_slots - lease.shared
        if self._on_their_way(match) or not self._reclaimer.device_room(back.end - lease.shared - own):
            return False
        t.device.give(lease.cut_slots(lease.shared))
        lease.node = self._prefetcher.met(lease)
        match = t.tree.match(lease.root, lease.tokens, back.end * t.tree.page_key_bytes)
        self._bring_up(lease, match.device)
        return True

    def _bring_up(self, lease: Lease, device: int) -> None:
        """Use all pages up to `lease.node`, which is pinned: `device` are on the device, the others are loaded back."""
        t, node = self._t, lease.node
        assert node is not None
        ids = t.tree.path_ids(node)
        lease.reused += device - lease.shared
        lease.add_slots(t.table.device_slots.take(ids[lease.shared : device]))
        lease.shared = device
        if device < len(ids):
            self._load(lease, ids[device:])
        else:
            self._activate(lease)

    def _load(self, lease: Lease, ids: Ids) -> None:
        """Start a load-back of host pages; they come whatever becomes of the lease."""
        t, node = self._t, lease.node
        assert node is not None

        def landed(op: CopyOp) -> None:
            if lease.load is not op or (lease.state is LeaseState.ACTIVE and op.state is OpState.FAILED):
                return  # given up, or computing on what did not come: the next commit says so
            lease.load = None
            if lease.state is LeaseState.LOADING:
                self._loaded(lease)

        lease.state = LeaseState.LOADING
        lease.load = self._mover.load_back(node, ids, t.device.take(len(ids)), landed)

    def _loaded(self, lease: Lease) -> None:
        """A lease's load has ended: go on with what is on the device."""
        t = self._t
        assert lease.node is not None
        ids = t.tree.path_ids(lease.node)
        slots = t.table.device_slots.take(ids)
        lacking = np.flatnonzero(slots == NOWHERE)
        usable = int(lacking[0]) if len(lacking) else len(ids)
        lease.add_slots(slots[lease.shared : usable])
        lease.reused += usable - lease.shared
        lease.shared = usable
        if usable < len(ids):
            self.metrics.recomputed_tokens.labels("load_failed").inc((len(ids) - usable) * self.geometry.page_size)
            self._sharing.move_pin(lease, self._node_at(lease, usable))
        self._activate(lease)

    def _node_at(self, lease: Lease, pages: int) -> Node:
        tree = self._t.tree
        return self._sharing.ends_at(tree.match(lease.root, lease.tokens, pages * tree.page_key_bytes))

    def _activate(self, lease: Lease) -> None:
        """All that was found in memory is on the device."""
        lease.state = LeaseState.ACTIVE
        lease.cached = lease.shared * self.geometry.page_size
        if lease.prefetch is None:
            self._used(lease)

    def _used(self, lease: Lease) -> None:
        """No more of a lease's hit is coming: count it once, and the use of its pages."""
        t = self._t
        self._count(lease)
        if lease.shared and lease.node is not None:
            ids = t.tree.path_ids(lease.node)
            t.table.hits[ids] = t.table.hits.take(ids) + 1
            self._backup.reused(lease.node)

    def _count(self, lease: Lease) -> None:
        """Count the hit of a lease's first admission, once it is known."""
        if not lease.counted:
            lease.counted = True
            lease.hits = self._split_by_tier(lease)
            self.metrics.count_lookup(lease.prompt_tokens, lease.hits)

    def _split_by_tier(self, lease: Lease) -> TierHits:
        """Reused tokens by the tier they were in at arrival; what others computed meanwhile was on the device when used."""
        size, pages = self.geometry.page_size, lease.reused
        device, host, disk = lease.found
        in_device = min(pages, device)
        in_host = min(pages - in_device, host)
        in_disk = min(pages - in_device - in_host, disk)
        late = pages - in_device - in_host - in_disk
        return TierHits((in_device + late) * size, in_host * size, in_disk * size)

    def _is_bare(self, node: Node) -> bool:
        table, last = self._t.table, node.pages[-1]
        return not node.children and node.host_len == 0 and not table.device_busy[last] and not table.host_busy[last]

    def _gauges(self) -> Iterator[Metric]:
        yield from pool_gauges(self._t)
        pinned = GaugeMetricFamily("hicache_host_pinned_bytes", "Page-locked bytes of the host pool")
        pinned.add_metric([], 0 if self._host is None else self._host.pinned_bytes)
        yield pinned
        hinted = GaugeMetricFamily("hicache_hinted_pages", "Pages of prefixes that a hint keeps")
        hinted.add_metric([], self.hints.pinned_pages)
        yield hinted
