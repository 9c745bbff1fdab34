"""One battery for every page store."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest

from storage.base import GetOutcome, NamespaceInfo, PageRecord, PageRef, PageStore, PutOutcome
from storage.errors import StoreUnavailable
from storage.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = 20_000  # not a multiple of a block
CAPACITY = 8 << 20
STORED, PRESENT, NO_ROOM = PutOutcome.STORED, PutOutcome.PRESENT, PutOutcome.NO_ROOM
HIT, ABSENT, MISMATCH = GetOutcome.HIT, GetOutcome.ABSENT, GetOutcome.MISMATCH


def digest(text: str) -> bytes:
    return random.Random(text).randbytes(16)


NAMESPACE = digest("namespace")
OTHER = digest("other namespace")


def chain(name: str, pages: int, namespace: bytes = NAMESPACE) -> list[PageRef]:
    """A conversation of `pages` pages: keys, parents and tokens."""
    refs, parent = [], namespace
    for at in range(pages):
        key = digest(f"{name}/{at}/{namespace.hex()}")
        refs.append(PageRef(key, parent, namespace, random.Random(key).randbytes(64)))
        parent = key
    return refs


def payload_of(ref: PageRef, size: int = PAGE) -> bytes:
    return random.Random(ref.key).randbytes(size)


def put(store: PageStore, refs: list[PageRef], size: int = PAGE) -> list[PutOutcome]:
    return store.put_many([PageRecord(ref, memoryview(payload_of(ref, size))) for ref in refs])


def get(store: PageStore, refs: list[PageRef], size: int = PAGE) -> list[GetOutcome]:
    """Read pages; whatever is called a hit must be right."""
    buffers = [memoryview(bytearray(size)) for _ in refs]
    outcomes = store.get_many(refs, buffers)
    for ref, buffer, outcome in zip(refs, buffers, outcomes, strict=True):
        assert outcome is not HIT or buffer == payload_of(ref, size)
    return outcomes


@pytest.fixture(params=["memory", "lmdb", "lmdb-always", "memory-faulty", "lmdb-faulty"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PageStore]:
    backend, _, variant = request.param.partition("-")
    sync = "always" if variant == "always" else "batch"
    extra: dict[str, object] = {"free_floor_bytes": 0, "quotas": {"small": 1 << 20}}
    if variant == "faulty":
        extra["faults"] = {"faults": []}
    opened = open_store(backend, tmp_path / "store", CAPACITY, sync, extra)
    opened.register_namespace(NamespaceInfo(NAMESPACE, {"model": "m"}))
    opened.register_namespace(NamespaceInfo(OTHER, {"model": "n"}, tenant="small"))
    yield opened
    opened.close()


def test_it_is_a_page_store(store: PageStore) -> None:
    assert isinstance(store, PageStore)
    assert len(store.secret) == 32


def test_what_was_put_is_read_back(store: PageStore) -> None:
    refs = chain("a", 20)
    assert put(store, refs) == [STORED] * 20
    assert get(store, refs) == [HIT] * 20


def test_pages_of_several_sizes_share_a_store(store: PageStore) -> None:
    for size in (1, 4096, 65_536, 1_500_000):
        refs = chain(f"size {size}", 2)
        assert put(store, refs, size) == [STORED] * 2
        assert get(store, refs, size) == [HIT] * 2


def test_large_batches_are_read_in_order(store: PageStore) -> None:
    refs = chain("large", 40)
    put(store, refs[:30], 100_000)
    assert get(store, refs, 100_000) == [HIT] * 30 + [ABSENT] * 10


def test_long_tokens_take_a_longer_header(store: PageStore) -> None:
    ref = PageRef(digest("long"), NAMESPACE, NAMESPACE, bytes(range(256)) * 64)
    assert put(store, [ref]) == [STORED]
    assert get(store, [ref]) == [HIT]


def test_32_byte_keys_work(store: PageStore) -> None:
    namespace = digest("wide") + digest("namespace")
    store.register_namespace(NamespaceInfo(namespace))
    ref = PageRef(digest("wide") + digest("key"), namespace, namespace, b"1234")
    assert put(store, [ref]) == [STORED]
    assert get(store, [ref]) == [HIT]


def test_a_second_put_is_present(store: PageStore) -> None:
    refs = chain("twice", 2)
    put(store, refs)
    assert put(store, refs) == [PRESENT] * 2
    assert put(store, [*refs, refs[0]]) == [PRESENT] * 3


def test_a_key_twice_in_a_batch_is_stored_once(store: PageStore) -> None:
    ref = chain("double", 1)[0]
    assert put(store, [ref, ref]) == [STORED, PRESENT]
    assert store.stats().pages == 1


@pytest.mark.parametrize("pages", [0, 1, 2, 7, 64])
def test_count_prefix_finds_the_end(store: PageStore, pages: int) -> None:
    refs = chain("prefix", 64)
    put(store, refs[:pages])
    assert store.count_prefix([ref.key for ref in refs]) == pages
    assert store.count_prefix([]) == 0


def test_other_tokens_are_a_mismatch_and_deleted(store: PageStore) -> None:
    ref = chain("tokens", 1)[0]
    put(store, [ref])
    assert get(store, [ref._replace(tokens=bytes(64))]) == [MISMATCH]
    assert get(store, [ref]) == [ABSENT]
    assert store.stats().errors["mismatch"] == 1
    assert put(store, [ref]) == [STORED]


@pytest.mark.parametrize("field", ["parent_key", "namespace", "tokens"])
def test_every_field_must_agree(store: PageStore, field: str) -> None:
    ref = chain("field", 1)[0]
    put(store, [ref])
    assert get(store, [ref._replace(**{field: OTHER})]) == [MISMATCH]


def test_another_length_is_a_mismatch(store: PageStore) -> None:
    ref = chain("length", 1)[0]
    put(store, [ref])
    assert get(store, [ref], PAGE + 1) == [MISMATCH]
    put(store, [ref])
    assert get(store, [ref], PAGE - 1) == [MISMATCH]


def test_an_unregistered_namespace_is_refused(store: PageStore) -> None:
    with pytest.raises(ValueError, match="not registered"):
        put(store, chain("nobody", 1, digest("nobody")))


def test_namespaces_do_not_see_each_other(store: PageStore) -> None:
    mine, theirs = chain("same", 3), chain("same", 3, OTHER)
    put(store, mine)
    assert store.count_prefix([ref.key for ref in theirs]) == 0
    assert get(store, theirs) == [ABSENT] * 3


def test_capacity_holds_and_the_newest_stay(store: PageStore) -> None:
    for at in range(60):
        assert put(store, chain(f"churn {at}", 10)) == [STORED] * 10
        assert store.stats().bytes <= CAPACITY
    assert get(store, chain("churn 59", 10)) == [HIT] * 10
    assert get(store, chain("churn 0", 10)) == [ABSENT] * 10
    assert store.stats().evicted_pages > 0


def test_eviction_takes_leaves_first(store: PageStore) -> None:
    for at in range(60):
        put(store, chain(f"leaf {at}", 10))
    for at in range(60):
        refs = chain(f"leaf {at}", 10)
        there = store.count_prefix([ref.key for ref in refs])
        assert get(store, refs) == [HIT] * there + [ABSENT] * (10 - there)


def test_what_was_read_stays_longer(store: PageStore) -> None:
    favourite = chain("favourite", 5)
    put(store, favourite)
    for at in range(60):
        put(store, chain(f"noise {at}", 10))
        assert get(store, favourite) == [HIT] * 5


def test_a_batch_does_not_evict_its_own_parents(store: PageStore) -> None:
    refs = chain("growing", 400)
    for at in range(400):
        (outcome,) = put(store, [refs[at]])
        if outcome is NO_ROOM:
            break
        assert outcome is STORED
    assert 0 < at < 399
    there = store.count_prefix([ref.key for ref in refs])
    assert there <= at
    assert get(store, refs[:there]) == [HIT] * there


def test_a_batch_larger_than_the_store_keeps_its_beginning(store: PageStore) -> None:
    refs = chain("too long", 600)
    outcomes = put(store, refs)
    kept = outcomes.count(STORED)
    assert 100 < kept < 600
    assert outcomes == [STORED] * kept + [NO_ROOM] * (600 - kept)
    assert get(store, refs[:kept]) == [HIT] * kept
    assert store.stats().errors["no_room"] == 600 - kept
    assert store.stats().bytes <= CAPACITY


def test_a_page_larger_than_the_store_has_no_room(store: PageStore) -> None:
    small, large = chain("small", 1), chain("large", 1)
    put(store, small)
    assert put(store, large, CAPACITY) == [NO_ROOM]


def test_a_quota_holds_for_its_tenant_only(store: PageStore) -> None:
    put(store, chain("free", 100))
    for at in range(20):
        put(store, chain(f"bounded {at}", 5, OTHER))
    by_digest = {share.info.digest: share for share in store.stats().namespaces}
    assert 0 < by_digest[OTHER].bytes <= 1 << 20
    assert by_digest[NAMESPACE].pages == 100
    assert get(store, chain("bounded 19", 5, OTHER)) == [HIT] * 5


def test_delete_counts_what_was_there(store: PageStore) -> None:
    refs = chain("delete", 3)
    put(store, refs)
    keys = [ref.key for ref in refs]
    assert store.delete([keys[2], keys[2], digest("never")]) == 1
    assert get(store, refs) == [HIT, HIT, ABSENT]


def test_a_deleted_parent_can_come_back(store: PageStore) -> None:
    refs = chain("hole", 3)
    put(store, refs)
    store.delete([refs[1].key])
    assert put(store, [refs[1]]) == [STORED]
    assert get(store, refs) == [HIT] * 3
    assert store.count_prefix([ref.key for ref in refs]) == 3


def test_clear_takes_one_namespace_or_all(store: PageStore) -> None:
    mine, theirs = chain("mine", 4), chain("theirs", 5, OTHER)
    put(store, mine)
    put(store, theirs)
    assert store.clear(digest("never seen")) == 0
    assert store.clear(OTHER) == 5
    assert get(store, mine) == [HIT] * 4
    assert get(store, theirs) == [ABSENT] * 5
    assert store.clear() == 4
    assert store.stats().pages == 0
    assert put(store, theirs) == [STORED] * 5


def test_stats_agree_with_a_recount(store: PageStore) -> None:
    put(store, chain("counted", 7))
    put(store, chain("counted too", 3, OTHER))
    stats = store.stats()
    by_digest = {share.info.digest: share for share in stats.namespaces}
    assert (stats.pages, stats.capacity_bytes) == (10, CAPACITY)
    assert (by_digest[NAMESPACE].pages, by_digest[NAMESPACE].tokens) == (7, 7 * 16)
    assert by_digest[OTHER].info.tenant == "small"
    assert dict(by_digest[NAMESPACE].info.labels) == {"model": "m"}
    assert by_digest[NAMESPACE].oldest_use_s <= by_digest[NAMESPACE].newest_use_s
    assert 10 * PAGE <= sum(share.bytes for share in stats.namespaces) <= stats.bytes


def test_threads_read_and_write_at_once(store: PageStore) -> None:
    wrong: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for at in range(15):
                refs = chain(f"{name} {at % 5}", 8)
                put(store, refs)
                assert set(get(store, refs)) <= {HIT, ABSENT}
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(f"thread {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_closed_store_is_unavailable(store: PageStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable):
        store.count_prefix([digest("x")])
    with pytest.raises(StoreUnavailable):
        put(store, chain("late", 1))
    with pytest.raises(StoreUnavailable):
        store.stats()
