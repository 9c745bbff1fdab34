"""The cache as a whole, case by case; what happens in any other order is left to the state machine."""

from __future__ import annotations

import pytest

from hicache.config import CacheConfig, PrefetchConfig
from hicache.errors import CacheClosed
from hicache.keys import Namespace
from hicache.lease import LeaseState
from hicache.transfer.operation import CopyOp, LayerGate, OpKind, PrefetchOp
from storage.memory import MemoryStore
from tests.state_machine.recount import recount
from tests.state_machine.rig import Client, Rig

WAIT = PrefetchConfig(policy="wait_complete", threshold_tokens=1, quota=1.0)


def rig_of(store: MemoryStore | None = None, **config: object) -> Rig:
    """A cache of pages of one token."""
    settings = {"device_pages": 16, "host_pages": 16, "prefetch": WAIT, **config}
    return Rig(CacheConfig(**settings), 1, store)  # type: ignore[arg-type]


def active(rig: Rig, tokens: list[int], salt: str = "") -> Client:
    """Open and admit, everything coming to its end."""
    client = rig.open(tokens, salt)
    rig.settle()
    assert rig.cache.ready(client.lease)
    assert rig.cache.admit(client.lease, 0)
    rig.settle()
    assert client.lease.state is LeaseState.ACTIVE
    client.computed = client.lease.cached
    rig.check_lease(client)
    return client


def serve(rig: Rig, tokens: list[int], salt: str = "") -> Client:
    """A whole request, computed and released, its copies landed."""
    client = active(rig, tokens, salt)
    while not rig.compute(client, len(tokens) - client.computed):
        assert rig.cache.room_is_coming
        rig.settle()
    rig.cache.release(client.lease)
    rig.settle()
    return client


def only(rig: Rig, kind: OpKind) -> object:
    """The one pending operation of a kind."""
    (op,) = [op for op in rig.pending if op.kind is kind]
    return op


def value(rig: Rig, name: str, **labels: str) -> float:
    return rig.cache.metrics.registry.get_sample_value(f"hicache_{name}", labels) or 0.0


def test_a_lease_that_is_not_active_takes_no_slots_and_shares_nothing() -> None:
    rig = rig_of()
    waiting, ended = rig.open([1, 2, 3]), serve(rig, [4, 5, 6])
    for lease in (waiting.lease, ended.lease):
        with pytest.raises(AssertionError, match="only an active lease has slots"):
            rig.cache.extend(lease, 4)
        with pytest.raises(AssertionError, match="only an active lease is computed"):
            rig.cache.commit(lease, 3)
    with pytest.raises(AssertionError, match="admitted once"):
        rig.cache.admit(ended.lease, 0)
    rig.cache.release(waiting.lease)
    rig.cache.release(ended.lease)  # again
    assert rig.cache.stats()["hicache_pages"]["device/private"] == 0


def test_what_has_no_slots_is_not_committed() -> None:
    rig = rig_of()
    client = active(rig, [1, 2, 3])
    assert rig.cache.extend(client.lease, 2)
    with pytest.raises(AssertionError, match="`extend`"):
        rig.cache.commit(client.lease, 3)


def test_prefetch_that_lands_below_a_running_request_does_not_grow_its_node() -> None:
    store = MemoryStore(1 << 20)
    serve(rig_of(store), list(range(9)))
    rig = rig_of(store)
    waiting = rig.open(list(range(9)))
    rig.complete(only(rig, OpKind.PROBE))
    rig.poll()
    running = rig.open(list(range(9)))
    assert rig.cache.admit(running.lease, 0)
    assert rig.compute(running, 4)
    rig.complete(only(rig, OpKind.PREFETCH))
    rig.poll()
    recount(rig, [waiting, running])
    assert rig.compute(running, 5)
    recount(rig, [waiting, running])


def test_persist_passes_over_nodes_that_made_room_for_others() -> None:
    store = MemoryStore(1 << 20)
    rig = rig_of(store, device_pages=6, host_pages=2, write_policy="write_back", watermark_low=0.0, watermark_high=0.0)
    for first in range(8):
        serve(rig, [first, 9, 9])
    rig.set_eager(eager=True)
    rig.cache.persist(5.0)
    rig.set_eager(eager=False)
    rig.settle()
    recount(rig, [])


def test_persist_ends_when_nothing_more_can_be_done() -> None:
    rig = rig_of(MemoryStore(1 << 20), device_pages=4, host_pages=2, write_policy="write_back")
    serve(rig, [1, 2, 3])
    held = rig.cache._t.host.take(rig.cache._t.host.free)
    rig.cache.persist(5.0)  # own time stands still: only the lack of anything to wait for ends it
    rig.cache._t.host.give(held)


def test_a_store_that_hangs_keeps_no_device_page_from_a_running_request() -> None:
    """Pages whose only host copy hangs in a write are let go of, when those above them must leave the device."""
    rig = rig_of(MemoryStore(1 << 20), device_pages=6, host_pages=1)
    first = active(rig, [1, 2, 3, 4])
    assert rig.compute(first, 3)
    rig.fail(only(rig, OpKind.BACKUP))
    rig.poll()
    assert rig.compute(first, 1)
    rig.complete(only(rig, OpKind.BACKUP))
    rig.poll()
    assert only(rig, OpKind.STORE)
    rig.cache.release(first.lease)
    second = rig.open([7, 8, 9, 10, 11])
    assert rig.cache.admit(second.lease, 0)
    assert rig.compute(second, 5)
    assert len(rig.cache._t.orphans) == 1
    recount(rig, [second])
    rig.cache.release(second.lease)
    rig.settle()
    recount(rig, [])


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_copies_that_always_fail_hold_up_nobody(write_policy: str) -> None:
    rig = rig_of(device_pages=6, host_pages=8, write_policy=write_policy)
    for first in range(4):
        client = rig.open([first, 9, 9, 9, 9])
        for _ in range(5):
            if client.lease.state is LeaseState.WAITING:
                rig.cache.admit(client.lease, 0)
            if client.lease.state is LeaseState.ACTIVE and rig.compute(client, 5 - client.computed):
                break
            for op in rig.pending:
                rig.fail(op)
            rig.poll()
        assert client.computed == 5
        rig.cache.release(client.lease)
        recount(rig, [])


def loading(prompt: list[int]) -> tuple[Rig, Client, Client]:
    """A request that computes a prompt while its pages, come from disk meanwhile, are loaded back for another one."""
    store = MemoryStore(1 << 20)
    serve(rig_of(store), prompt)
    rig = rig_of(store, device_pages=32)
    running = rig.open(prompt)
    assert rig.cache.admit(running.lease, 0)
    waiting = rig.open(prompt)
    for kind in (OpKind.PROBE, OpKind.PREFETCH):
        for op in [op for op in rig.pending if op.kind is kind]:
            rig.complete(op)
        rig.poll()
    assert rig.cache.admit(waiting.lease, 0)
    assert waiting.lease.state is LeaseState.LOADING
    return rig, running, waiting


def test_pages_being_loaded_for_another_are_adopted_only_when_they_have_landed() -> None:
    rig, running, waiting = loading(list(range(9)))
    assert rig.compute(running, 4)
    assert running.lease.shared == 0
    recount(rig, [running, waiting])
    rig.complete(only(rig, OpKind.LOAD_BACK))
    rig.poll()
    assert rig.compute(running, 5)
    assert running.lease.shared == 9
    assert running.lease.slots[:8].tolist() == waiting.lease.slots[:8].tolist()
    recount(rig, [running, waiting])


def test_pages_being_loaded_for_another_are_not_loaded_twice() -> None:
    rig, running, waiting = loading(list(range(9)))
    third = rig.open([*range(9), 7])
    assert rig.cache.awaits_load(third.lease)
    assert not rig.cache.admit(third.lease, 0)
    rig.complete(only(rig, OpKind.LOAD_BACK))
    rig.poll()
    assert not rig.cache.awaits_load(third.lease)
    assert rig.cache.admit(third.lease, 0)
    assert third.lease.cached == 8
    recount(rig, [running, waiting, third])


def test_a_load_that_fails_is_recomputed_and_counted() -> None:
    rig, running, waiting = loading(list(range(9)))
    rig.fail(only(rig, OpKind.LOAD_BACK))
    rig.poll()
    assert waiting.lease.state is LeaseState.ACTIVE
    assert (waiting.lease.cached, waiting.lease.hits.total) == (0, 0)
    assert value(rig, "recomputed_hit_tokens_total", reason="load_failed") == 8
    recount(rig, [running, waiting])


def test_a_request_aborted_while_loading_leaves_its_pages_to_the_next() -> None:
    rig, running, waiting = loading(list(range(9)))
    rig.cache.release(waiting.lease)
    recount(rig, [running])
    rig.complete(only(rig, OpKind.LOAD_BACK))
    rig.poll()
    recount(rig, [running])
    again = rig.open(list(range(9)))
    assert again.at_arrival == (8, 0)


def test_aborting_a_waiting_request_gives_its_quota_back() -> None:
    store = MemoryStore(1 << 20)
    serve(rig_of(store), list(range(9)))
    rig = rig_of(store)
    for _ in range(3):
        waiting = rig.open(list(range(9)))
        rig.complete(only(rig, OpKind.PROBE))
        rig.poll()
        assert rig.cache._prefetcher.quota_used == 8
        rig.cache.release(waiting.lease)
        assert rig.cache._prefetcher.quota_used == 0
        rig.settle()
        recount(rig, [])


def test_a_mirror_that_is_being_stored_keeps_its_host_slot() -> None:
    rig = rig_of(MemoryStore(1 << 20), host_pages=2)
    first = active(rig, [1, 2, 3])
    assert rig.compute(first, 2)
    rig.complete(only(rig, OpKind.BACKUP))
    rig.poll()
    assert only(rig, OpKind.STORE)
    assert rig.compute(first, 1)
    assert [op.kind for op in rig.pending] == [OpKind.STORE]
    assert value(rig, "dropped_pages_total", reason="backup_declined") == 1
    recount(rig, [first])


def test_mirrors_make_room_when_the_host_pool_is_the_smaller_one() -> None:
    rig = rig_of(device_pages=16, host_pages=4)
    for first in range(4):
        serve(rig, [first, 8, 9, 9])
    assert value(rig, "transfer_pages_total", op="backup") == 16
    assert value(rig, "dropped_pages_total", reason="backup_declined") == 0


def test_a_full_host_copies_each_page_once_and_lets_no_step_wait() -> None:
    rig = rig_of(device_pages=8, host_pages=16)
    for first in range(12):
        client = active(rig, [first, 8, 9, 9])
        assert rig.compute(client, 4), "room on the device had to be waited for"
        rig.settle()
        rig.cache.release(client.lease)
    assert value(rig, "transfer_pages_total", op="backup") == 12 * 4
    assert value(rig, "evicted_pages_total", tier="host") == 12 * 4 - 16


def test_each_hit_counts_for_the_tier_its_page_was_in_at_arrival() -> None:
    store = MemoryStore(1 << 20)
    serve(rig_of(store), list(range(9)))
    rig = rig_of(store)
    first = serve(rig, list(range(9)))
    assert first.lease.hits == (0, 0, 8)
    second = serve(rig, list(range(9)))
    assert second.lease.hits == (8, 0, 0)
    tiers = {tier: value(rig, "hit_tokens_total", tier=tier) for tier in ("device", "host", "disk")}
    assert tiers == {"device": 8, "host": 0, "disk": 8}
    assert value(rig, "lookup_tokens_total") == 18
    assert value(rig, "miss_tokens_total") == 2


def test_a_flipped_bit_on_disk_ends_the_hit_there_and_the_page_is_stored_again() -> None:
    class Flip:
        count = 0

        def after_read(self, payload: memoryview, got_bytes: int) -> int:
            self.count += 1
            payload[0] ^= self.count == 4
            return got_bytes

    store = MemoryStore(1 << 20, medium=Flip())
    serve(rig_of(store), list(range(9)))
    rig = rig_of(store)
    assert serve(rig, list(range(9))).lease.cached == 3
    assert value(rig, "store_errors_total", kind="get_corrupt") == 1
    assert serve(rig_of(store), list(range(9))).lease.cached == 8


def test_a_salt_separates_in_every_tier() -> None:
    store = MemoryStore(1 << 20)
    rig = rig_of(store)
    serve(rig, list(range(9)), "a")
    for salt in ("", "b"):
        assert serve(rig, list(range(9)), salt).lease.cached == 0
    rig = rig_of(store)
    for salt in ("c", "a"):
        assert serve(rig, list(range(9)), salt).lease.cached == (8 if salt == "a" else 0)


def test_a_closed_cache_opens_nothing_and_can_be_closed_again() -> None:
    rig = rig_of(MemoryStore(1 << 20))
    serve(rig, [1, 2, 3])
    rig.cache.close()
    rig.cache.close()
    with pytest.raises(CacheClosed):
        rig.cache.open([1], Namespace("m"))


def test_close_settles_what_a_waiting_request_had_in_flight() -> None:
    store = MemoryStore(1 << 20)
    serve(rig_of(store), list(range(9)))
    rig = rig_of(store)
    waiting = rig.open(list(range(9)))
    rig.cache.close()
    assert rig.cache.in_flight == 0
    rig.cache.release(waiting.lease)
    assert rig.cache._t.host.owned == rig.cache._t.tree.host_only_pages


def test_a_lease_is_of_use_to_its_own_cache_alone() -> None:
    rig, other = rig_of(), rig_of()
    lease = rig.open([1, 2, 3]).lease
    with pytest.raises(AssertionError, match="cache that it was opened on"):
        other.cache.admit(lease, 0)
    with pytest.raises(AssertionError, match="cache that it was opened on"):
        other.cache.release(lease)
    rig.settle()
    assert rig.cache.admit(lease, 0)
    rig.cache.release(lease)
    recount(other, [])


def test_release_is_idempotent_and_a_released_lease_stays_so() -> None:
    rig = rig_of()
    client = active(rig, [1, 2, 3])
    rig.cache.release(client.lease)
    rig.cache.release(client.lease)
    assert client.lease.state is LeaseState.RELEASED
    recount(rig, [])


def test_without_reuse_every_prompt_is_computed_anew() -> None:
    rig = rig_of(reuse=False)
    for _ in range(2):
        client = active(rig, [1, 2, 3])
        assert client.lease.cached == 0
        assert rig.compute(client, 3)
        rig.cache.release(client.lease)
    assert rig.resident() == {}
    assert (value(rig, "lookup_tokens_total"), value(rig, "miss_tokens_total")) == (6, 6)


def test_nothing_more_is_queued_for_a_store_that_stalls() -> None:
    rig = rig_of(MemoryStore(1 << 20), device_pages=16, host_pages=4)
    first = active(rig, [1, 2, 3, 4, 5, 6])
    assert rig.compute(first, 1)
    rig.complete(only(rig, OpKind.BACKUP))
    rig.poll()
    stalled = only(rig, OpKind.STORE)
    stalled.started_s -= 100
    for _ in range(5):
        assert rig.compute(first, 1)
        rig.complete(only(rig, OpKind.BACKUP))
        rig.poll()
    assert [op for op in rig.pending if op.kind is OpKind.STORE] == [stalled]
    assert value(rig, "dropped_pages_total", reason="backup_declined") == 0
    recount(rig, [first])


def test_a_full_host_is_asked_once_for_room_not_once_a_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(device_pages=200, host_pages=2, write_policy="write_back", watermark_low=0.0, watermark_high=0.0)
    for first in range(200):
        serve(rig, [first])
    held = rig.cache._t.host.take(2)
    looked: list[object] = []
    idle = rig.cache._reclaimer._device_idle
    monkeypatch.setattr(rig.cache._reclaimer, "_device_idle", lambda node: looked.append(node) or idle(node))
    assert rig.cache._reclaimer.device_room(3)
    assert len(looked) <= 3 * 200
    rig.cache._t.host.give(held)


def overlapping(prompt: list[int]) -> tuple[Rig, Client]:
    """A request that computes the front of its hit while the back is being read, one page an operation."""
    store = MemoryStore(1 << 20)
    serve(rig_of(store), prompt)
    timeout = PrefetchConfig(threshold_tokens=1, overlap_tokens=1, quota=1.0)
    rig = Rig(CacheConfig(device_pages=16, host_pages=16, prefetch=timeout), 1, store, costs=(1.0, 1.0))
    client = rig.open(prompt)
    rig.complete(only(rig, OpKind.PROBE))
    rig.poll()
    assert rig.cache.ready(client.lease)
    assert rig.cache.admit(client.lease, 0)
    return rig, client


def reads(rig: Rig) -> list[PrefetchOp]:
    return [op for op in rig.pending if isinstance(op, PrefetchOp)]


def overlap(rig: Rig) -> tuple[float, float, float]:
    planned, computed, loaded = (value(rig, "overlap_tokens_total", what=what) for what in ("planned", "computed", "loaded"))
    return planned, computed, loaded


def test_the_front_is_computed_while_the_back_is_read_until_they_meet() -> None:
    rig, client = overlapping(list(range(9)))
    assert client.lease.state is LeaseState.ACTIVE
    assert [len(op.refs) for op in reads(rig)] == [1] * 8
    for _ in range(4):
        rig.complete(reads(rig)[0])
        rig.poll()
        assert rig.compute(client, 1)
        recount(rig, [client])
    assert (client.computed, value(rig, "lookup_tokens_total")) == (4, 0)
    assert rig.compute(client, 1)
    assert client.lease.state is LeaseState.LOADING
    assert client.lease.held_pages == 8
    recount(rig, [client])
    rig.settle()
    assert (client.lease.state, client.lease.cached) == (LeaseState.ACTIVE, 8)
    rig.compute(client, 5)
    assert client.computed == 9
    assert client.lease.hits == (0, 0, 4)
    assert overlap(rig) == (4, 4, 4)
    assert value(rig, "recomputed_hit_tokens_total", reason="overlap") == 4
    assert value(rig, "transfer_pages_total", op="prefetch") == 4
    assert (value(rig, "lookup_tokens_total"), value(rig, "miss_tokens_total")) == (9, 5)
    recount(rig, [client])


def test_pages_that_were_read_and_computed_keep_the_computed_copy_and_free_the_other() -> None:
    rig, client = overlapping(list(range(9)))
    assert rig.compute(client, 3)
    while client.computed < 5:
        assert rig.compute(client, 1)
    for op in reads(rig)[:5]:
        rig.complete(op)
    rig.poll()
    rig.compute(client, 1)
    rig.settle()
    assert client.lease.hits == (0, 0, 3)
    assert overlap(rig)[1:] == (5, 3)
    recount(rig, [client])


def test_a_request_never_waits_for_a_store_that_hangs() -> None:
    rig, client = overlapping(list(range(9)))
    while client.computed < 9:
        before = client.computed
        assert rig.compute(client, 9)
        assert client.computed > before
    assert client.lease.hits.total == 0
    assert value(rig, "recomputed_hit_tokens_total", reason="late") == 8
    assert all(op.cancelled for op in reads(rig))
    recount(rig, [client])
    rig.settle()
    recount(rig, [client])


def test_a_page_of_the_back_that_can_not_be_read_is_computed() -> None:
    rig, client = overlapping(list(range(9)))
    rig.complete(reads(rig)[0])
    rig.fail(reads(rig)[0])
    rig.poll()
    assert all(op.cancelled for op in reads(rig))
    while client.computed < 7:
        assert rig.compute(client, 9)
    rig.compute(client, 9)
    rig.settle()
    assert client.lease.hits == (0, 0, 1)
    recount(rig, [client])


@pytest.mark.parametrize("end", ["suspend", "release"])
def test_who_ends_while_its_back_is_read_leaves_nothing_behind(end: str) -> None:
    rig, client = overlapping(list(range(9)))
    assert rig.compute(client, 2)
    rig.complete(reads(rig)[0])
    rig.poll()
    getattr(rig.cache, end)(client.lease)
    assert rig.cache._prefetcher.quota_used == 0
    assert (value(rig, "lookup_tokens_total"), value(rig, "miss_tokens_total")) == (9, 9)
    rig.settle()
    recount(rig, [client] if end == "suspend" else [])


def reading_from_disk(host_pages: int) -> tuple[Rig, Client]:
    """A request whose first eight pages are being read, for which it waits as long as the planner thinks right."""
    store = MemoryStore(1 << 20)
    serve(rig_of(store), list(range(9)))
    timeout = PrefetchConfig(threshold_tokens=1, overlap_tokens=1, quota=1.0)
    rig = Rig(CacheConfig(device_pages=16, host_pages=host_pages, prefetch=timeout), 1, store, costs=(0.001, 1.0))
    client = rig.open(list(range(9)))
    rig.complete(only(rig, OpKind.PROBE))
    rig.poll()
    return rig, client


def test_pages_that_are_late_go_on_from_the_back() -> None:
    rig, client = reading_from_disk(host_pages=16)
    (late,) = reads(rig)
    assert not rig.cache.ready(client.lease)
    rig.clock.now += 1.0
    assert rig.cache.ready(client.lease)
    assert rig.cache.admit(client.lease, 0)
    assert late.cancelled
    assert [len(op.refs) for op in reads(rig)] == [8, *[1] * 8]
    rig.complete(late)
    for op in reads(rig)[:2]:
        rig.complete(op)
    rig.poll()
    while client.lease.state is not LeaseState.LOADING:
        assert rig.compute(client, 9)
    rig.settle()
    assert client.lease.hits == (0, 0, 2)
    recount(rig, [client])


def test_a_store_that_is_much_slower_than_computing_is_not_read() -> None:
    store = MemoryStore(1 << 20)
    serve(rig_of(store), list(range(9)))
    timeout = PrefetchConfig(threshold_tokens=1, overlap_tokens=1, quota=1.0)
    rig = Rig(CacheConfig(device_pages=16, host_pages=16, prefetch=timeout), 1, store, costs=(50.0, 1.0))
    client = active(rig, list(range(9)))
    assert client.lease.hits.total == 0
    assert value(rig, "recomputed_hit_tokens_total", reason="slow_store") == 8


def test_host_pages_that_are_slower_to_load_than_to_compute_are_computed_and_stay_where_they_are() -> None:
    rig = rig_of(device_pages=10)
    serve(rig, list(range(9)))
    serve(rig, list(range(50, 59)))
    rig.cache.observe_compute([(0, 100)], 0.1)
    rig.cache._t.planner.observe_load(10, 10.0)
    client = rig.open(list(range(9)))
    device, host = client.at_arrival
    assert host
    assert rig.cache.admit(client.lease, 0)
    assert (client.lease.state, client.lease.cached) == (LeaseState.ACTIVE, device)
    client.computed = device
    assert value(rig, "recomputed_hit_tokens_total", reason="slow_host") == host
    assert rig.compute(client, 9 - device)
    assert client.lease.shared == 9
    assert value(rig, "transfer_pages_total", op="load_back") == 0
    recount(rig, [client])


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_batches_that_land_in_another_order_are_attached_in_theirs(bad: int | None) -> None:
    store = MemoryStore(1 << 20)
    serve(rig_of(store), list(range(4)))
    rig = rig_of(store, prefetch=PrefetchConfig(policy="wait_complete", threshold_tokens=1, quota=1.0, batch_bytes=1))
    client = rig.open(list(range(4)))
    rig.complete(only(rig, OpKind.PROBE))
    rig.poll()
    ops = reads(rig)
    for at in (2, 0, 1):
        (rig.fail if at == bad else rig.complete)(ops[at])
        rig.poll()
        recount(rig, [client])
    rig.settle()
    assert rig.cache.ready(client.lease)
    assert rig.cache.cached_pages(client.lease) == (3 if bad is None else bad)
    recount(rig, [client])


def test_waiting_for_an_operation_leaves_the_order_in_which_they_ended() -> None:
    rig = rig_of(MemoryStore(1 << 20))
    first = active(rig, [1, 2, 3])
    assert rig.compute(first, 1)
    assert rig.compute(first, 1)
    settled: list[object] = []
    for op in rig.pending:
        end = op.on_end
        op.on_end = lambda op, end=end: settled.append(op) or end(op)  # type: ignore[misc]
    ops = rig.pending
    for op in ops:
        rig.complete(op)
    assert rig.cache.wait(1.0)
    assert rig.cache.wait(1.0)
    rig.poll()
    assert settled == ops


def test_what_has_landed_is_loaded_back_while_the_rest_is_read_unless_somebody_else_needs_the_device() -> None:
    store = MemoryStore(1 << 20)
    serve(rig_of(store), list(range(5)))
    rig = rig_of(store, prefetch=PrefetchConfig(policy="wait_complete", threshold_tokens=1, quota=1.0, batch_bytes=1))
    client = rig.open(list(range(5)))
    rig.complete(only(rig, OpKind.PROBE))
    rig.poll()
    for _ in range(2):
        rig.complete(reads(rig)[0])
        rig.poll()
    assert only(rig, OpKind.LOAD_BACK).ids.shape == (1,)  # type: ignore[attr-defined]
    rig.complete(only(rig, OpKind.LOAD_BACK))
    rig.poll()
    assert only(rig, OpKind.LOAD_BACK)  # of what has landed meanwhile
    recount(rig, [client])
    other = rig.open([7, 8, 9])
    assert rig.cache.admit(other.lease, 0)
    for op in rig.pending:
        rig.complete(op)
    rig.poll()
    assert not rig.pending
    assert rig.open(list(range(5))).at_arrival == (2, 2)
    assert rig.cache.admit(client.lease, 0)
    rig.settle()
    assert client.lease.hits == (0, 0, 4)


def test_what_a_hint_brings_up_stays_on_the_host() -> None:
    store = MemoryStore(1 << 20)
    serve(rig_of(store), list(range(5)))
    rig = rig_of(store)
    rig.cache.hints.prefetch(list(range(4)), Namespace("m"))
    rig.settle()
    rig.poll()
    assert rig.cache._t.tree.host_only_pages == 4
    assert value(rig, "transfer_pages_total", op="load_back") == 0


def coming_back(rig: Rig, tokens: list[int]) -> tuple[Client, CopyOp]:
    """A request that has been served before, left the device, and is being loaded back now."""
    serve(rig, tokens)
    serve(rig, list(range(100, 99 + rig.config.device_pages)))
    client = rig.open(tokens)
    assert rig.cache.admit(client.lease, 0)
    assert client.lease.state is LeaseState.LOADING
    (op,) = rig.pending
    assert isinstance(op, CopyOp)
    return client, op


def started_early(rig: Rig, client: Client, op: CopyOp) -> LayerGate:
    """Give the load its gate and let the request start."""
    assert rig.copier is not None
    assert rig.cache.start(client.lease) is None, "started without a gate"
    rig.copier.issue(op)
    gate = rig.cache.start(client.lease)
    assert gate is not None
    assert client.lease.state is LeaseState.ACTIVE
    client.computed = client.lease.cached
    return gate


def test_pages_of_a_request_that_started_early_are_there_behind_the_gate_and_shared_when_they_have_landed() -> None:
    rig = rig_of(device_pages=6)
    client, op = coming_back(rig, [1, 2, 3, 4, 5])
    gate = started_early(rig, client, op)
    assert client.lease.cached == 4
    recount(rig, [client])
    with pytest.raises(AssertionError, match="wrong bytes"):
        rig.check_lease(client)
    gate.wait(0)
    assert rig.compute(client, 1)
    recount(rig, [client])
    rig.complete(op)
    rig.poll()
    recount(rig, [client])
    rig.cache.commit(client.lease, 5)
    assert client.lease.shared == 5
    rig.cache.release(client.lease)
    rig.settle()
    recount(rig, [])


def test_slots_of_an_early_start_stay_with_the_copy_until_it_has_landed_whoever_leaves() -> None:
    rig = rig_of(device_pages=6)
    client, op = coming_back(rig, [1, 2, 3, 4, 5])
    started_early(rig, client, op).wait(0)
    assert rig.compute(client, 1)
    rig.cache.release(client.lease)
    recount(rig, [])
    other = rig.open([7, 8, 9, 10, 11])
    assert not rig.cache.admit(other.lease, 0)
    rig.complete(op)
    rig.poll()
    recount(rig, [other])
    assert rig.cache.admit(other.lease, 0)
    rig.cache.release(other.lease)
    rig.settle()
    recount(rig, [])


def test_pages_that_are_late_and_have_no_room_to_be_read_again_are_computed_and_counted() -> None:
    rig, client = reading_from_disk(host_pages=8)
    rig.clock.now += 1.0
    assert rig.cache.admit(client.lease, 0)
    assert client.lease.prefetch is None
    assert value(rig, "recomputed_hit_tokens_total", reason="late") == 8
    rig.settle()
    assert rig.compute(client, 9)
    recount(rig, [client])
