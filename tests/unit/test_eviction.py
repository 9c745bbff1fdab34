"""The order over leaves against a plain sort."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hicache.errors import ConfigError
from hicache.eviction import POLICIES, EvictionOrder, Usage


def in_order(order: EvictionOrder[str]) -> list[str]:
    """All leaves as they would go, one after the other."""
    gone: list[str] = []
    while (leaf := order.pick(lambda leaf: leaf not in gone)) is not None:
        gone.append(leaf)
    return gone


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "use", "late", "discard", "pick"]),
        st.sampled_from("abcdefgh"),
        st.integers(0, 3),
        st.sets(st.sampled_from("abcdefgh"), max_size=4),
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=50)
@given(steps=STEPS)
def test_order_equals_a_sort_by_rank_and_tick(policy: str, steps: list[tuple[str, str, int, set[str]]]) -> None:
    order: EvictionOrder[str] = EvictionOrder(policy)
    usages: dict[str, Usage] = {}
    listed: set[str] = set()
    tick = 100
    for action, leaf, number, blocked in steps:
        usage = usages.setdefault(leaf, Usage(tick))
        tick += 2
        if action == "discard":
            order.discard(leaf)
            listed.discard(leaf)
        elif action in ("add", "use", "late"):
            if action == "use":
                usage.hits += 1
                usage.priority = max(usage.priority, number)
            if action == "add" or (action == "use" and POLICIES[policy].moves_on_use):
                usage.tick = tick - 1
            order.add(leaf, usage)
            listed.add(leaf)
        want = sorted(listed, key=lambda leaf: (POLICIES[policy].rank(usages[leaf]), usages[leaf].tick))
        assert set(order) == listed
        assert len(order) == len(listed)
        assert order.pick(lambda leaf, blocked=blocked: leaf not in blocked) == next(
            (leaf for leaf in want if leaf not in blocked), None
        )
        assert in_order(order) == want


def test_picking_takes_nothing_off_the_list() -> None:
    order: EvictionOrder[str] = EvictionOrder("lru")
    order.add("a", Usage(1))
    assert order.pick(lambda leaf: True) == order.pick(lambda leaf: True) == "a"
    assert order.pick(lambda leaf: False) is None
    assert "a" in order


def test_leaf_that_comes_late_is_put_where_its_last_use_belongs() -> None:
    order: EvictionOrder[str] = EvictionOrder("lru")
    for tick, leaf in enumerate("abc"):
        order.add(leaf, Usage(10 * tick))
    order.add("late", Usage(5))
    order.add("later still", Usage(3))
    assert in_order(order) == ["a", "later still", "late", "b", "c"]


def test_list_does_not_grow_with_uses() -> None:
    """Stale heap entries and the queues of ranks that nobody has are dropped."""
    order: EvictionOrder[str] = EvictionOrder("lfu")
    usages = {leaf: Usage() for leaf in "abc"}
    for tick in range(2000):
        leaf = "abc"[tick % 3]
        usages[leaf].tick, usages[leaf].hits = tick % 7, tick
        order.add(leaf, usages[leaf])
        order.pick(lambda leaf: True)
    assert len(order._queues) <= 18 + 2 * len(order)
    assert len(order._ranks) == len(order._queues)
    assert len(order._late) <= 64 + 4 * len(order) + 1


def test_absorbed_uses_are_taken_over_once() -> None:
    parent, child = Usage(tick=5, hits=1, priority=0), Usage(tick=9, hits=2, priority=3)
    parent.absorb(child, recency=True)
    assert (parent.tick, parent.hits, parent.priority, child.hits) == (9, 3, 3, 0)
    parent.absorb(child, recency=True)
    assert parent.hits == 3


def test_first_in_keeps_its_birth_when_a_child_goes() -> None:
    parent = Usage(tick=5)
    parent.absorb(Usage(tick=9), recency=False)
    assert parent.tick == 5


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="lru, fifo, lfu, slru, priority, not random"):
        EvictionOrder("random")
