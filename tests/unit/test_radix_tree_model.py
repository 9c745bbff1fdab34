"""The tree against a dictionary of prefixes, and the order in which its leaves go against a scan of all of them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from hicache.eviction import POLICIES
from hicache.radix_tree import RadixTree

if TYPE_CHECKING:
    from hicache.eviction import EvictionOrder
    from hicache.radix_tree import Match, Node

Prefix = tuple[int, ...]
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=10)


class TreeMachine(RuleBasedStateMachine):
    """Pages of `page_size` equal tokens, so that a page is one number: `places` maps each stored prefix to its highest tier."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[Prefix, str] = {}
        self.ids: dict[Prefix, int] = {}
        self.pins: list[tuple[Node, Prefix]] = []
        self.touches = 0
        self.next_id = 0

    @initialize(policy=st.sampled_from(sorted(POLICIES)), page_size=st.sampled_from([1, 4, 16]))
    def start(self, policy: str, page_size: int) -> None:
        self.tree = RadixTree(page_size, policy)
        self.root = self.tree.hold_root(b"r" * 16)

    # ---- rules

    @rule(pages=PROMPTS, on_device=st.booleans(), priority=st.integers(-1, 2))
    def insert(self, pages: list[int], on_device: bool, priority: int) -> None:
        end = self._ends_at(self._match(pages))
        there = len(self._prefix(end))
        if there == len(pages):
            return
        on_device = on_device and (there == 0 or self.places[tuple(pages[:there])] == "device")
        self.tree.pin(end)
        ids = array("i", range(self.next_id, self.next_id + len(pages) - there))
        self.next_id += len(ids)
        self.tree.grow(end, self._key(pages[there:]), ids, on_device, priority)
        self.tree.unpin(end)
        for i, page in enumerate(ids):
            self.places[tuple(pages[: there + i + 1])] = "device" if on_device else "host"
            self.ids[tuple(pages[: there + i + 1])] = page

    @rule(pages=PROMPTS, priority=st.integers(-1, 2))
    def touch(self, pages: list[int], priority: int) -> None:
        self.tree.touch(self._match(pages).node, priority)
        self.touches += 1

    @rule(pages=PROMPTS)
    def pin(self, pages: list[int]) -> None:
        node = self._ends_at(self._match(pages))
        if node is not self.root:
            self.tree.pin(node)
            self.pins.append((node, self._prefix(node)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        node, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.tree.unpin(node)

    @rule(pages=PROMPTS, most=st.integers(1, 4))
    def promote(self, pages: list[int], most: int) -> None:
        """The host part of the first node on the way that is not wholly on the device comes up, or some of it."""
        for node in self.tree.path(self._match(pages).node):
            if node.host_len:
                count = min(most, node.host_len)
                for page in node.pages[node.device_len : node.device_len + count]:
                    self.places[self._prefix_of(page)] = "device"
                self.tree.promote(node, count)
                return

    @rule(most=st.integers(1, 4), skip=st.integers(0, 2))
    def demote(self, most: int, skip: int) -> None:
        node = self._to_go(self.tree.device_order, skip)
        if node is not None:
            count = min(most, node.device_len)
            for page in node.pages[node.device_len - count : node.device_len]:
                self.places[self._prefix_of(page)] = "host"
            self.tree.demote(node, count)

    @rule(most=st.integers(1, 4), tier=st.sampled_from(["device", "host"]))
    def truncate(self, most: int, tier: str) -> None:
        node = self._to_go(self.tree.device_order if tier == "device" else self.tree.host_order, 0)
        if node is not None and not node.children:
            prefix, count = self._prefix(node), min(most, len(node.pages))
            gone = self.tree.truncate(node, count).tolist()
            for i, page in enumerate(reversed(gone)):
                cut = prefix[: len(prefix) - i]
                assert self.ids.pop(cut) == page
                del self.places[cut]

    # ---- the reference

    def _to_go(self, order: EvictionOrder[Node], skip: int) -> Node | None:
        """The leaf that goes after `skip` others, found by a scan; the order must say the same."""
        leaves = sorted(self._leaves(order), key=self._rank(order))
        passed = leaves[:skip]
        want = leaves[skip] if skip < len(leaves) else None
        assert order.pick(lambda node: node not in passed) is want
        return want

    def _rank(self, order: EvictionOrder[Node]):
        tier = "device" if order is self.tree.device_order else "host"

        def rank(node: Node) -> tuple[int, int]:
            usage = getattr(node, tier)
            return order.policy.rank(usage), usage.tick

        return rank

    def _leaves(self, order: EvictionOrder[Node]) -> list[Node]:
        """Nodes whose last page in the tier has no page of the tier below it, and that no pin covers."""
        out = []
        for node in self.tree.nodes():
            prefix = self._prefix(node)
            first = len(prefix) - len(node.pages)
            if any(pinned[: len(prefix)] == prefix for _, pinned in self.pins):
                continue
            mine = [self.places[prefix[: first + i + 1]] for i in range(len(node.pages))]
            below = [place for other, place in self.places.items() if other[: len(prefix)] == prefix and other != prefix]
            if order is self.tree.device_order and "device" in mine and "device" not in below:
                out.append(node)
            if order is self.tree.host_order and mine[-1] == "host" and not below:
                out.append(node)
        return out

    # ---- what always holds

    @invariant()
    def dictionary_and_tree_agree(self) -> None:
        seen = {}
        for node in self.tree.nodes():
            prefix = self._prefix(node)
            first = len(prefix) - len(node.pages)
            for i, page in enumerate(node.pages):
                seen[prefix[: first + i + 1]] = (page, "device" if i < node.device_len else "host")
        assert seen == {prefix: (self.ids[prefix], place) for prefix, place in self.places.items()}

    @invariant()
    def totals_equal_a_recount(self) -> None:
        places = list(self.places.values())
        pinned = {node for handle, _ in self.pins for node in self.tree.path(handle)}
        assert self.tree.device_pages == places.count("device")
        assert self.tree.host_only_pages == places.count("host")
        assert self.tree.pinned_device_pages == sum(node.device_len for node in pinned)

    @invariant()
    def handles_still_end_where_they_ended(self) -> None:
        for node, prefix in self.pins:
            assert self._prefix(node) == prefix
            assert self.tree.path_ids(node).tolist() == [self.ids[prefix[: i + 1]] for i in range(len(prefix))]

    @invariant()
    def orders_list_exactly_the_leaves(self) -> None:
        for order in (self.tree.device_order, self.tree.host_order):
            leaves = self._leaves(order)
            assert set(order) == set(leaves)
            assert len(order) == len(leaves)

    @invariant()
    def every_use_is_counted_once_in_each_tier(self) -> None:
        nodes = [self.root, *self.tree.nodes()]
        assert sum(node.device.hits for node in nodes) == self.touches
        assert sum(node.host.hits for node in nodes) == self.touches

    @invariant()
    def matches_equal_the_longest_stored_prefix(self) -> None:
        for prefix in [*self.places, (0, 1, 2, 0, 1), (2, 2, 2, 2)]:
            tokens = [*prefix, 1]
            stored = [tuple(tokens[: i + 1]) in self.places for i in range(len(tokens))]
            pages = stored.index(False) if False in stored else len(tokens)
            device = sum(self.places[tuple(tokens[: i + 1])] == "device" for i in range(pages))
            assert self._match(tokens)[2:] == (pages, device)

    def teardown(self) -> None:
        """Everything can go, leaf by leaf, and then the root."""
        if not hasattr(self, "tree"):
            return
        while self.pins:
            self.tree.unpin(self.pins.pop()[0])
        while (leaf := self._to_go(self.tree.host_order, 0) or self._to_go(self.tree.device_order, 0)) is not None:
            count = leaf.host_len or len(leaf.pages)
            prefix = self._prefix(leaf)
            self.tree.truncate(leaf, count)
            for i in range(count):
                del self.places[prefix[: len(prefix) - i]]
        assert (self.tree.device_pages, self.tree.host_only_pages, self.tree.pinned_device_pages) == (0, 0, 0)
        assert not self.places
        self.tree.drop_root(self.root)
        assert not self.tree.roots

    # ---- helpers

    def _key(self, pages: list[int]) -> bytes:
        return np.repeat(np.array(pages, np.int32), self.tree.page_size).tobytes()

    def _match(self, pages: list[int]) -> Match:
        data = self._key(pages)
        return self.tree.match(self.root, data, len(data))

    def _ends_at(self, match: Match) -> Node:
        if match.depth == len(match.node.pages):
            return match.node
        return self.tree.split(match.node, match.depth)

    def _prefix(self, node: Node) -> Prefix:
        data = b"".join(bytes(each.key) for each in self.tree.path(node))
        return tuple(np.frombuffer(data, np.int32)[:: self.tree.page_size].tolist())

    def _prefix_of(self, page: int) -> Prefix:
        return next(prefix for prefix, other in self.ids.items() if other == page)


def test_tree_equals_a_dictionary() -> None:
    run_state_machine_as_test(TreeMachine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_tree_equals_a_dictionary_for_long() -> None:
    run_state_machine_as_test(TreeMachine, settings=settings(max_examples=5000, stateful_step_count=60, deadline=None))
