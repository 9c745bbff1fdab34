"""One machine drives the whole cache: any order of calls, of completions and of failures."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from hicache.config import CacheConfig, PrefetchConfig
from hicache.lease import LeaseState
from storage.lmdb_store import LmdbStore
from storage.memory import MemoryStore
from tests.state_machine.recount import recount
from tests.state_machine.rig import Client, Rig

if TYPE_CHECKING:
    from storage.base import PageStore

QUICK = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
LONG = settings(QUICK, max_examples=50 * QUICK.max_examples)
WITH_LMDB = settings(QUICK, max_examples=6)

PREFETCHES = st.builds(
    PrefetchConfig,
    policy=st.sampled_from(["best_effort", "wait_complete", "timeout"]),
    threshold_tokens=st.sampled_from([0, 1, 5]),
    quota=st.sampled_from([0.2, 0.5, 1.0]),
    batch_bytes=st.sampled_from([16 << 20, 1]),
    overlap_tokens=st.sampled_from([1, 4]),
)
CONFIGS = st.builds(
    CacheConfig,
    device_pages=st.sampled_from([8, 12, 5]),
    host_pages=st.sampled_from([12, 24, 6, 2, 0]),
    reuse=st.sampled_from([True] * 15 + [False]),
    write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
    eviction=st.sampled_from(["lru", "lfu", "slru", "fifo", "priority", "adaptive"]),
    prefetch=PREFETCHES,
    watermark_low=st.just(0.2),
    watermark_high=st.just(0.4),
    hash_algo=st.sampled_from(["xxh3_128", "sha256"]),
    storage_admission=st.sampled_from(["all", "second-sight"]),
)

DOCUMENTS = ([0] * 9, [0, 0, 1, 1, 0, 1, 0, 1, 1], [1, 0, 0, 1, 1, 1, 0, 0, 1])
SHAPES = st.builds(lambda document, pages: document[:pages], st.sampled_from(DOCUMENTS), st.integers(0, 9))
TAILS = st.lists(st.integers(0, 2), max_size=3)
MOST_CLIENTS = 5


class BitFlips:
    """Damages the next payload read, if told to."""

    next = False

    def after_read(self, payload: memoryview, got_bytes: int) -> int:
        if self.next and got_bytes:
            payload[0] ^= 1
        self.next = False
        return got_bytes


class CacheMachine(RuleBasedStateMachine):
    """Requests come, compute, wait and go while copies and store accesses end in any order, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[Client] = []
        self.finished: list[list[int]] = []
        self.lookups = 0
        self.hits = [0, 0, 0]

    def make_store(self, size: str) -> PageStore | None:
        """A store of the kind under test; the machine closes it."""
        if size == "none":
            return None
        return MemoryStore({"large": 1 << 20, "small": 10 * 4200}[size], medium=self.flips)

    def reopen_store(self) -> None:
        """What a restart does to the store."""

    @initialize(
        config=CONFIGS,
        page_size=st.sampled_from([1, 4]),
        store=st.sampled_from(["large", "small", "none"]),
        warm=st.sampled_from([True, False]),
        costs=st.sampled_from([(1.0, 0.5), (0.0, 0.0), (0.2, 1.0), (4.0, 0.5), (2.0, 1.0)]),
    )
    def start(self, config: CacheConfig, page_size: int, store: str, warm: bool, costs: tuple[float, float]) -> None:
        self._start(config, page_size, store, warm, costs)

    def _start(self, config: CacheConfig, page_size: int, store: str, warm: bool, costs: tuple[float, float]) -> None:
        self.flips = BitFlips()
        self.store = self.make_store(store) if config.host_pages else None
        if warm:
            self.rig = Rig(CacheConfig(device_pages=40, host_pages=40, hash_algo=config.hash_algo), page_size, self.store)
            for document in DOCUMENTS:
                self._serve(self._tokens(document, [1]), patience=4)
            self.rig.settle()
        self.rig = Rig(config, page_size, self.store, costs=costs)
        self._forget_counts()

    # ---- requests

    @rule(
        shape=SHAPES,
        tail=TAILS,
        salt=st.sampled_from(["", "", "", "salt"]),
        priority=st.integers(0, 2),
        twins=st.sampled_from([1, 1, 2]),
    )
    def open_new(self, shape: list[int], tail: list[int], salt: str, priority: int, twins: int) -> None:
        for _ in range(twins):
            self._open(self._tokens(shape, tail), salt, priority)

    @precondition(lambda self: self.finished)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def open_next_turn(self, data: st.DataObject, more: list[int]) -> None:
        self._open(data.draw(st.sampled_from(self.finished)) + more, "", 0)

    def _tokens(self, shape: list[int], tail: list[int]) -> list[int]:
        """Whole pages of one token each, so that prompts share many, and a tail."""
        return [token for token in shape for _ in range(self.rig.page_size)] + tail

    def _open(self, tokens: list[int], salt: str, priority: int) -> Client | None:
        if len(self.clients) >= MOST_CLIENTS:
            return None
        client = self.rig.open(tokens, salt, priority)
        self.clients.append(client)
        if self.rig.config.reuse:
            assert client.lease.found[:2] == client.at_arrival
        return client

    def _in(self, *states: LeaseState) -> list[Client]:
        return [client for client in self.clients if client.lease.state in states]

    @precondition(lambda self: self._in(LeaseState.WAITING))
    @rule(data=st.data(), reserve=st.sampled_from([0, 0, 0, 2]))
    def admit(self, data: st.DataObject, reserve: int) -> None:
        self._admit(data.draw(st.sampled_from(self._in(LeaseState.WAITING))), reserve)

    def _admit(self, client: Client, reserve: int = 0) -> None:
        cache, lease = self.rig.cache, client.lease
        if cache.admit(lease, reserve):
            self._noticed(client)
            return
        assert lease.state is LeaseState.WAITING
        fits = cache.room_pages() >= self.rig.geometry.pages(len(client.tokens) + 1) + reserve
        assert not fits or cache.room_is_coming or cache.awaits_load(lease), "refused for no reason"

    def _noticed(self, client: Client) -> None:
        """A lease that has just become active starts from what it shares."""
        lease = client.lease
        if lease.state is not LeaseState.ACTIVE:
            return
        client.computed = lease.cached
        assert lease.cached == lease.shared * self.rig.page_size
        assert lease.cached < max(1, len(client.tokens)), "nothing is left to compute the next token from"
        self.rig.check_lease(client)
        self._account(client)

    def _account(self, client: Client) -> None:
        """Once no more of a lease's hit is coming, it counts."""
        lease, size = client.lease, self.rig.page_size
        if client.counted or not lease.counted:
            assert client.counted or lease.state is not LeaseState.ACTIVE or lease.prefetch is not None
            return
        client.counted = True
        self.lookups += client.prompt_tokens
        device, host = client.at_arrival
        assert lease.hits.total == lease.reused * size <= max(0, client.prompt_tokens - 1)
        assert lease.hits.host == min(max(0, lease.reused - device), host) * size
        assert self.store is not None or lease.hits.disk == 0
        self.hits = [total + tokens for total, tokens in zip(self.hits, lease.hits, strict=True)]

    def _uncomputed(self) -> list[Client]:
        return [client for client in self._in(LeaseState.ACTIVE) if client.computed < len(client.tokens)]

    @precondition(lambda self: self._uncomputed())
    @rule(data=st.data(), count=st.integers(1, 40))
    def compute(self, data: st.DataObject, count: int) -> None:
        self._compute(data.draw(st.sampled_from(self._uncomputed())), count)

    def _compute(self, client: Client, count: int) -> None:
        count = min(count, len(client.tokens) - client.computed)
        there = not count or self.rig.compute(client, count)
        self._account(client)
        if not there:
            need = self.rig.geometry.pages(client.computed + count) - client.lease.num_slots
            cache = self.rig.cache
            assert need > cache.room_pages() or cache.room_is_coming, "no room for no reason"

    @precondition(lambda self: any(client.computed == len(client.tokens) < 40 for client in self._in(LeaseState.ACTIVE)))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        there = [client for client in self._in(LeaseState.ACTIVE) if client.computed == len(client.tokens) < 40]
        self._generate(data.draw(st.sampled_from(there)), tokens)

    def _generate(self, client: Client, tokens: list[int]) -> None:
        for token in tokens:
            if client.computed < len(client.tokens):
                return
            client.lease.append(token)
            client.tokens.append(token)
            self._compute(client, 1)

    @precondition(lambda self: self._in(LeaseState.ACTIVE, LeaseState.LOADING))
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self._in(LeaseState.ACTIVE, LeaseState.LOADING)))
        self.rig.cache.suspend(client.lease)
        self._account(client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(self.clients)))

    def _release(self, client: Client) -> None:
        self.rig.cache.release(client.lease)
        self._account(client)
        self.clients.remove(client)
        if client.salt == "" and client.computed == len(client.tokens):
            self.finished = [*self.finished[-3:], client.tokens]

    @rule(
        shape=SHAPES,
        tail=TAILS,
        answer=st.lists(st.integers(0, 2), max_size=5),
        patience=st.sampled_from([4, 3, 2, 1, 0]),
        stays=st.booleans(),
    )
    def serve(self, shape: list[int], tail: list[int], answer: list[int], patience: int, stays: bool) -> None:
        client = self._serve(self._tokens(shape, [*tail, 1]), patience)
        if client is not None and client.lease.state is LeaseState.ACTIVE:
            self._generate(client, answer)
        if client is not None and not stays:
            self._release(client)

    def _serve(self, tokens: list[int], patience: int) -> Client | None:
        """A request's usual way. With little patience, operations that it could wait for stay in flight."""
        client = self._open(tokens, "", 0)
        if client is None:
            return None
        for _ in range(patience):
            self._complete_all()
            if client.lease.state is LeaseState.WAITING and self.rig.cache.ready(client.lease):
                self._admit(client)
            if client.lease.state is LeaseState.ACTIVE:
                self._compute(client, 2 * self.rig.page_size)
        if client.lease.state is LeaseState.WAITING:
            self._admit(client)
        if client.lease.state is LeaseState.ACTIVE:
            self._compute(client, len(client.tokens))
        return client

    # ---- operations

    @precondition(lambda self: self.rig.pending)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def end_one(self, data: st.DataObject, fails: bool) -> None:
        op = data.draw(st.sampled_from(self.rig.pending))
        (self.rig.fail if fails else self.rig.complete)(op)

    @precondition(lambda self: self.rig.pending)
    @rule()
    def complete_all(self) -> None:
        self._complete_all()

    def _complete_all(self) -> None:
        for op in self.rig.pending:
            self.rig.complete(op)
        self._poll()

    @precondition(lambda self: self.rig.ended)
    @rule()
    def poll(self) -> None:
        self._poll()

    def _poll(self) -> None:
        loading = self._in(LeaseState.LOADING)
        self.rig.poll()
        for client in loading:
            self._noticed(client)

    # ---- the world and the whole cache

    @rule(event=st.sampled_from(["crash", "flush", "persist", "stall", "damage", "time"]))
    def something_happens(self, event: str) -> None:
        getattr(self, f"_{event}")()

    def _time(self) -> None:
        self.rig.clock.now += 50.0
        assert all(self.rig.cache.ready(client.lease) for client in self.clients), "a request waits beyond its deadline"

    def _damage(self) -> None:
        self.flips.next = True

    def _stall(self) -> None:
        for op in self.rig.pending:
            op.started_s -= 100

    def _flush(self) -> None:
        before = self.rig.cache._t.table.used
        assert self.rig.cache.flush() == before - self.rig.cache._t.table.used

    def _persist(self) -> None:
        """At shutdown: requests are gone, the disk answers, and time passes."""
        rig = self.rig
        for client in list(self.clients):
            self._release(client)
        rig.settle()
        rig.set_eager(eager=True)
        rig.clock.drift = 0.001
        rig.cache.persist(1.0)
        rig.clock.drift = 0.0
        rig.set_eager(eager=False)

    def _crash(self) -> None:
        self.reopen_store()
        old = self.rig
        self.rig = Rig(old.config, old.page_size, self.store, old.clock, old.costs)
        self._forget_counts()

    def _forget_counts(self) -> None:
        self.clients.clear()
        self.lookups, self.hits = 0, [0, 0, 0]

    # ---- what always holds

    @invariant()
    def everything_adds_up(self) -> None:
        recount(self.rig, self.clients)

    @invariant()
    def counters_equal_a_recount(self) -> None:
        sample = self.rig.cache.metrics.registry.get_sample_value
        tiers = [sample("hicache_hit_tokens_total", {"tier": tier}) for tier in ("device", "host", "disk")]
        assert tiers == self.hits
        assert sample("hicache_lookup_tokens_total") == self.lookups == sum(tiers) + sample("hicache_miss_tokens_total")

    def teardown(self) -> None:
        """Everything ends, everybody goes: nothing is left, and the store gave back only what was stored."""
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        rig.settle()
        for client in self.clients:
            rig.cache.release(client.lease)
        rig.settle()
        recount(rig, [])
        rig.cache.flush()
        t = rig.cache._t
        assert (t.device.free, t.host.free) == (t.device.capacity, t.host.capacity)
        assert t.table.used == 0
        assert not t.tree.roots
        assert rig.cache._prefetcher.quota_used == 0
        assert (t.coming_device, t.coming_host) == (0, 0)
        rig.cache.close()
        if self.store is not None:
            self.store.close()


class LmdbCacheMachine(CacheMachine):
    """The same over a store on disk, which a restart really closes and opens."""

    def make_store(self, size: str) -> PageStore | None:
        self.folder = tempfile.TemporaryDirectory()
        return self._open_store()

    def _open_store(self) -> PageStore:
        return LmdbStore(Path(self.folder.name) / "store", 8 << 20, sync="none", free_floor_bytes=0, medium=self.flips)

    def reopen_store(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = self._open_store()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            self.folder.cleanup()


class SlowStoreMachine(CacheMachine):
    """A store that has all documents and is about as slow as computing: fronts are computed while backs are read."""

    @initialize(
        config=CONFIGS,
        prefetch=st.builds(PrefetchConfig, threshold_tokens=st.just(0), overlap_tokens=st.sampled_from([1, 4])),
        host_pages=st.sampled_from([24, 12, 6]),
        page_size=st.sampled_from([1, 4]),
        costs=st.sampled_from([(1.0, 1.0), (2.0, 0.5), (4.0, 0.5)]),
    )
    def start(
        self, config: CacheConfig, prefetch: PrefetchConfig, host_pages: int, page_size: int, costs: tuple[float, float]
    ) -> None:
        config = dataclasses.replace(config, prefetch=prefetch, host_pages=host_pages)
        self._start(config, page_size, "large", True, costs)


def test_cache_holds_its_promises_in_any_order_of_events() -> None:
    run_state_machine_as_test(CacheMachine, settings=QUICK)


def test_cache_holds_its_promises_over_lmdb() -> None:
    run_state_machine_as_test(LmdbCacheMachine, settings=WITH_LMDB)


def test_cache_holds_its_promises_while_fronts_are_computed_and_backs_are_read() -> None:
    run_state_machine_as_test(SlowStoreMachine, settings=QUICK)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", [CacheMachine, SlowStoreMachine])
def test_cache_holds_its_promises_for_long(machine: type[CacheMachine]) -> None:
    run_state_machine_as_test(machine, settings=LONG)
