"""The cache as a whole, case by case; what happens in any other order is left to the state machine."""

from __future__ import annotations

import pytest

from hicache.config import CacheConfig, PrefetchConfig
from hicache.lease import LeaseState
from hicache.transfer.operation import OpKind
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
