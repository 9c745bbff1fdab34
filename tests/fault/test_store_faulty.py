"""The fault-injecting store: what it does to calls, and what the stores below it make of damaged reads."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from storage.base import GetOutcome, NamespaceInfo, PageRecord, PutOutcome
from storage.errors import StoreError, StoreUnavailable
from storage.faulty import Fault, FaultPlan, FaultyStore
from storage.registry import open_store

sys.path.insert(0, str(Path(__file__).parent))
import store_load as load

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(params=["memory", "lmdb"])
def faulty(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., FaultyStore]:
    """Open a store with the given faults and 20 good pages in it."""

    def opened(*faults: dict[str, object]) -> FaultyStore:
        extra = {"faults": {"seed": 7, "faults": list(faults)}, "free_floor_bytes": 0}
        store = open_store(request.param, tmp_path / "store", load.CAPACITY, extra_config=extra)
        assert isinstance(store, FaultyStore)
        request.addfinalizer(store.close)
        store.register_namespace(NamespaceInfo(load.NAMESPACE))
        return store

    return opened


def put(store: FaultyStore, pages: int = 20) -> list[PutOutcome]:
    return store.put_many([PageRecord(ref, memoryview(load.payload_of(ref))) for ref in load.chain(0, pages)])


def get(store: FaultyStore, pages: int = 20) -> list[GetOutcome]:
    """Read pages; whatever is called a hit must be right."""
    refs = load.chain(0, pages)
    buffers = [memoryview(bytearray(load.SIZES[0])) for _ in refs]
    outcomes = store.get_many(refs, buffers)
    for ref, buffer, outcome in zip(refs, buffers, outcomes, strict=True):
        assert outcome is not GetOutcome.HIT or buffer == load.payload_of(ref)
    return outcomes


@pytest.mark.parametrize("kind", ["flip", "short"])
def test_damaged_reads_are_corrupt_and_written_again(faulty: Callable[..., FaultyStore], kind: str) -> None:
    store = faulty({"kind": kind, "at": 3, "every": 5})
    put(store)
    outcomes = get(store)
    assert outcomes.count(GetOutcome.CORRUPT) == 4
    assert outcomes.count(GetOutcome.HIT) == 16
    assert store.injected == {kind: 4}
    assert store.stats().errors["corrupt"] == 4
    assert put(store).count(PutOutcome.STORED) == 4


def test_many_damaged_reads_never_give_a_wrong_byte(faulty: Callable[..., FaultyStore]) -> None:
    store = faulty({"kind": "flip", "at": 1, "every": 3}, {"kind": "short", "at": 2, "every": 7})
    for _ in range(60):
        put(store)
        get(store)
    assert sum(store.injected.values()) > 300


def test_the_nth_call_fails_and_the_next_works(faulty: Callable[..., FaultyStore]) -> None:
    store = faulty({"kind": "fail", "method": "get_many", "at": 2}, {"kind": "fail", "method": "put_many", "at": 1})
    assert put(store) == [PutOutcome.FAILED] * 20
    assert put(store) == [PutOutcome.STORED] * 20
    assert get(store) == [GetOutcome.HIT] * 20
    assert get(store) == [GetOutcome.FAILED] * 20
    assert get(store) == [GetOutcome.HIT] * 20


def test_calls_without_outcomes_raise(faulty: Callable[..., FaultyStore]) -> None:
    store = faulty({"kind": "fail", "method": "count_prefix"}, {"kind": "raise", "method": "put_many"})
    with pytest.raises(StoreError, match="injected"):
        store.count_prefix([])
    with pytest.raises(StoreError, match="injected"):
        put(store)
    assert put(store) == [PutOutcome.STORED] * 20


def test_a_hung_call_ends_at_its_deadline_or_at_close(faulty: Callable[..., FaultyStore]) -> None:
    store = faulty({"kind": "hang", "method": "stats", "seconds": 0.01}, {"kind": "hang", "method": "sync", "seconds": 3600})
    with pytest.raises(StoreUnavailable, match="hung"):
        store.stats()
    ended = threading.Event()

    def sync() -> None:
        with pytest.raises(StoreUnavailable, match="hung"):
            store.sync()
        ended.set()

    thread = threading.Thread(target=sync)
    thread.start()
    while "hang" not in store.injected or store.injected["hang"] < 2:
        ended.wait(0.001)
    store.close()
    thread.join()
    assert ended.is_set()


def test_a_slow_call_works(faulty: Callable[..., FaultyStore]) -> None:
    store = faulty({"kind": "slow", "seconds": 0.01, "every": 1})
    assert put(store) == [PutOutcome.STORED] * 20
    assert store.injected["slow"] == 1


def test_a_fault_strikes_where_its_plan_says() -> None:
    fault = Fault("fail", at=3, every=4)
    assert [call for call in range(1, 16) if fault.strikes(call)] == [3, 7, 11, 15]
    assert [call for call in range(1, 16) if Fault("fail", at=3).strikes(call)] == [3]


@pytest.mark.parametrize(
    "config",
    [
        {"faults": [{"kind": "explode"}]},
        {"faults": [{"kind": "fail", "method": "close"}]},
        {"faults": [{"kind": "fail", "at": 0}]},
        {"faults": [{"kind": "fail", "often": 1}]},
        {"faults": {"kind": "fail"}},
        {"mistakes": []},
    ],
)
def test_senseless_plans_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="fault"):
        FaultPlan.from_config(config)


@pytest.mark.parametrize("extra", [{"fautls": {}}, {"faults": []}, {"quotas": {"a": "b"}}, {"free_floor_bytes": "1"}])
def test_senseless_extra_config_is_refused(tmp_path: Path, extra: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"unknown|must be"):
        open_store("lmdb", tmp_path / "store", load.CAPACITY, extra_config=extra)


def test_unknown_backends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lmdb, memory"):
        open_store("tape", tmp_path, load.CAPACITY)
