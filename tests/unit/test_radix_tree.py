"""The tree, case by case. Random cases against a dictionary are in test_radix_tree_model.py."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.radix_tree import FEW, RadixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.eviction import EvictionOrder
    from hicache.radix_tree import Match, Node

ROOT = b"r" * 16


class Plant:
    """A tree with one root, and page ids counted up."""

    def __init__(self, page_size: int = 1, policy: str = "lru") -> None:
        self.tree = RadixTree(page_size, policy)
        self.root = self.tree.hold_root(ROOT)
        self.next_id = 0

    def find(self, tokens: Sequence[int] | str) -> Match:
        data = key(tokens)
        return self.tree.match(self.root, data, len(data))

    def add(self, tokens: Sequence[int] | str, *, on_device: bool = True, priority: int = 0) -> Node:
        """Store the pages that the tree lacks, splitting where the match ends."""
        data = key(tokens)
        match = self.find(tokens)
        end = match.node
        if match.depth < len(end.pages):
            end = self.tree.split(end, match.depth)
        rest = data[match.pages * self.tree.page_key_bytes :]
        if not rest:
            return end
        count = len(rest) // self.tree.page_key_bytes
        ids = array("i", range(self.next_id, self.next_id + count))
        self.next_id += count
        return self.tree.grow(end, rest, ids, on_device, priority)

    def use(self, tokens: Sequence[int] | str, priority: int = 0) -> None:
        self.tree.touch(self.find(tokens).node, priority)

    def ids(self, node: Node) -> list[int]:
        return self.tree.path_ids(node).tolist()


def key(tokens: Sequence[int] | str) -> bytes:
    """Tokens as the tree wants them; of a string, one a character."""
    values = [ord(c) for c in tokens] if isinstance(tokens, str) else list(tokens)
    return np.array(values, np.int32).tobytes()


def going(order: EvictionOrder[Node]) -> list[Node]:
    """All leaves of a tier in the order in which they would go."""
    out: list[Node] = []
    while (node := order.pick(lambda node: node not in out)) is not None:
        out.append(node)
    return out


# ---- look-up


def test_match_ends_inside_an_edge_that_forks() -> None:
    plant = Plant()
    plant.add("Hello_L.A.!")
    plant.add("Hello_L.A.!world")
    assert plant.find("Hello_world").pages == 6
    assert plant.find("Hello_L.A.!wor").pages == 14
    assert plant.find("Jello").pages == 0


def test_match_changes_nothing() -> None:
    plant = Plant()
    node = plant.add("abcdef")
    match = plant.find("abcx")
    assert (match.node, match.depth, match.pages) == (node, 3, 3)
    assert len(node.pages) == 6
    assert list(plant.tree.nodes()) == [node]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_match_counts_whole_pages_only(page_size: int) -> None:
    plant = Plant(page_size)
    stored = list(range(5 * page_size))
    plant.add(stored)
    for differs_at in (0, page_size - 1, page_size, 3 * page_size + page_size // 2, 5 * page_size - 1):
        tokens = list(stored)
        tokens[differs_at] = -1
        assert plant.find(tokens).pages == differs_at // page_size


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_children_that_differ_only_late_in_their_first_page_are_told_apart(page_size: int) -> None:
    plant = Plant(page_size)
    trunk = [7] * page_size
    for last in range(4):
        plant.add(trunk + [1] * (page_size - 1) + [last])
    assert len(plant.root.child_list()[0].child_list()) == 4
    for last in range(4):
        assert plant.find(trunk + [1] * (page_size - 1) + [last]).pages == 2
    assert plant.find(trunk + [1] * (page_size - 1) + [9]).pages == 1


def test_children_are_found_however_many_come_and_go() -> None:
    plant = Plant()
    plant.add("ab")
    names = [chr(ord("c") + i) for i in range(2 * FEW + 1)]
    nodes = {name: plant.add(f"ab{name}xy") for name in names}
    for count, name in enumerate(names, 1):
        assert all(plant.find(f"ab{each}x").node is nodes[each] for each in names[count - 1 :])
        upper = plant.tree.split(nodes[name], 1)
        assert plant.find(f"ab{name}x").node is nodes[name]
        plant.tree.truncate(nodes[name], 2)
        assert plant.find(f"ab{name}x").node is upper
        plant.tree.truncate(upper, 1)
        assert plant.find(f"ab{name}x").pages == 2
    assert [len(node) for node in plant.tree.nodes()] == [2]


def test_match_can_start_below_the_root() -> None:
    plant = Plant()
    upper = plant.add("abc")
    plant.tree.pin(upper)
    plant.tree.pin(upper)
    plant.add("abcdef")
    data = key("abcdexyz")
    match = plant.tree.match(upper, data, len(data), 3 * 4)
    assert (match.pages, match.device) == (2, 2)
    assert plant.tree.match(upper, data, 3 * 4, 3 * 4).pages == 0


def test_match_tells_how_much_of_it_is_on_the_device() -> None:
    plant = Plant()
    upper = plant.add("abcd")
    plant.tree.pin(upper)
    plant.tree.pin(upper)
    lower = plant.add("abcdef")
    plant.add("abcdefgh", on_device=False)
    assert plant.find("abcdefgh")[2:] == (8, 6)
    plant.tree.demote(lower, 1)
    assert plant.find("abcdefgh")[2:] == (8, 5)
    assert plant.find("abcde")[2:] == (5, 5)
    plant.tree.demote(lower, 1)
    assert plant.find("abcdefgh")[2:] == (8, 4)
    assert plant.find("ab")[2:] == (2, 2)


# ---- growth


def test_leaf_grows_in_place() -> None:
    plant = Plant()
    node = plant.add("abc")
    plant.tree.pin(node)
    assert plant.add("abcdef") is node
    assert (len(node.pages), node.device_len, plant.tree.device_pages, plant.tree.pinned_device_pages) == (6, 6, 6, 6)


def test_leaf_that_two_hold_gets_a_child_instead() -> None:
    plant = Plant()
    node = plant.add("abc")
    plant.tree.pin(node)
    plant.tree.pin(node)
    child = plant.add("abcdef")
    assert child is not node
    assert child.parent is node
    assert plant.ids(node) == [0, 1, 2]
    assert plant.ids(child) == [0, 1, 2, 3, 4, 5]


def test_host_leaf_grows_a_child_on_no_device_page_but_host_pages_in_place() -> None:
    plant = Plant()
    node = plant.add("abc", on_device=False)
    assert plant.add("abcd", on_device=False) is node
    mixed = plant.add("xyz")
    assert plant.add("xyzw", on_device=False) is mixed
    assert (mixed.device_len, mixed.host_len) == (3, 1)


def test_page_below_one_that_is_not_on_the_device_cannot_be_on_it() -> None:
    plant = Plant()
    plant.add("abc", on_device=False)
    with pytest.raises(AssertionError, match="a parent is on the device before its child"):
        plant.add("abcd", on_device=True)


def test_split_keeps_handles_and_pins() -> None:
    plant = Plant()
    node = plant.add("abcdef")
    plant.tree.pin(node)
    upper = plant.tree.split(node, 2)
    assert plant.ids(node) == [0, 1, 2, 3, 4, 5]
    assert plant.ids(upper) == [0, 1]
    assert (upper.users, node.users) == (1, 1)
    assert plant.tree.pinned_device_pages == 6
    assert going(plant.tree.device_order) == []
    plant.tree.unpin(node)
    assert (upper.users, node.users, plant.tree.pinned_device_pages) == (0, 0, 0)
    assert going(plant.tree.device_order) == [node]


def test_both_halves_of_a_split_can_be_pinned() -> None:
    plant = Plant()
    node = plant.add("abcdef")
    plant.tree.pin(node)
    upper = plant.tree.split(node, 2)
    plant.tree.pin(upper)
    plant.tree.unpin(node)
    assert (upper.users, node.users, plant.tree.pinned_device_pages) == (1, 0, 2)
    assert going(plant.tree.device_order) == [node]
    plant.tree.truncate(node, 4)
    plant.tree.unpin(upper)
    assert going(plant.tree.device_order) == [upper]


@pytest.mark.parametrize(("depth", "upper_device", "lower_device"), [(1, 1, 2), (3, 3, 0), (5, 3, 0)])
def test_split_of_a_node_that_is_partly_on_the_device(depth: int, upper_device: int, lower_device: int) -> None:
    plant = Plant()
    node = plant.add("abcdef")
    plant.tree.demote(node, 3)
    upper = plant.tree.split(node, depth)
    assert (upper.device_len, node.device_len) == (upper_device, lower_device)
    assert upper.device_children == (1 if lower_device else 0)
    assert (plant.tree.device_pages, plant.tree.host_only_pages) == (3, 3)
    assert going(plant.tree.device_order) == [node if lower_device else upper]
    assert going(plant.tree.host_order) == [node]


def test_split_divides_the_hashes_computed_so_far() -> None:
    plant = Plant()
    node = plant.add("abcd")
    node.hashes += b"A" * 16 + b"B" * 16
    upper = plant.tree.split(node, 3)
    assert (upper.hashes, node.hashes) == (b"A" * 16 + b"B" * 16, b"")
    top = plant.tree.split(upper, 1)
    assert (top.hashes, upper.hashes) == (b"A" * 16, b"B" * 16)


# ---- pins


def test_pin_protects_ancestors_and_is_counted_once_each() -> None:
    plant = Plant()
    trunk = plant.add("ab")
    plant.tree.pin(trunk)
    plant.tree.pin(trunk)
    left, right = plant.add("abcd"), plant.add("abxy")
    plant.tree.unpin(trunk)
    plant.tree.unpin(trunk)
    for node in (left, right, left):
        plant.tree.pin(node)
    assert (trunk.users, left.users, right.users) == (2, 2, 1)
    assert plant.tree.pinned_device_pages == 6
    plant.tree.unpin(left)
    plant.tree.unpin(right)
    assert (trunk.users, left.users, right.users) == (1, 1, 0)
    assert plant.tree.pinned_device_pages == 4
    assert going(plant.tree.device_order) == [right]


def test_unpinning_too_often_asserts() -> None:
    plant = Plant()
    node = plant.add("ab")
    plant.tree.pin(node)
    plant.tree.unpin(node)
    with pytest.raises(AssertionError, match="unpinned more often than pinned"):
        plant.tree.unpin(node)


def test_pinned_node_is_never_cut() -> None:
    plant = Plant()
    node = plant.add("ab")
    plant.tree.pin(node)
    with pytest.raises(AssertionError, match="never cut"):
        plant.tree.truncate(node, 1)


def test_pages_loaded_into_a_pinned_node_count_as_pinned() -> None:
    plant = Plant()
    node = plant.add("abc", on_device=False)
    plant.tree.pin(node)
    plant.tree.promote(node, 2)
    assert (plant.tree.device_pages, plant.tree.pinned_device_pages, plant.tree.host_only_pages) == (2, 2, 1)
    plant.tree.unpin(node)
    assert plant.tree.pinned_device_pages == 0
    assert going(plant.tree.device_order) == going(plant.tree.host_order) == [node]


# ---- leaves of each tier


def test_a_node_is_a_leaf_of_both_tiers_at_its_own_boundary() -> None:
    plant = Plant()
    node = plant.add("abcd")
    assert (going(plant.tree.device_order), going(plant.tree.host_order)) == ([node], [])
    plant.tree.demote(node, 1)
    assert (going(plant.tree.device_order), going(plant.tree.host_order)) == ([node], [node])
    plant.tree.demote(node, 3)
    assert (going(plant.tree.device_order), going(plant.tree.host_order)) == ([], [node])


def test_a_node_above_host_only_children_is_a_leaf_of_the_device() -> None:
    plant = Plant()
    trunk = plant.add("ab")
    plant.tree.pin(trunk)
    plant.tree.pin(trunk)
    left, right = plant.add("abcd"), plant.add("abxy")
    plant.tree.unpin(trunk)
    plant.tree.unpin(trunk)
    plant.tree.demote(left, 2)
    assert going(plant.tree.device_order) == [right]
    plant.tree.demote(right, 2)
    assert going(plant.tree.device_order) == [trunk]
    plant.tree.promote(left, 1)
    assert going(plant.tree.device_order) == [left]
    assert going(plant.tree.host_order) == [left, right]


def test_truncate_gives_the_last_ids_and_keeps_the_rest() -> None:
    plant = Plant()
    node = plant.add("abcdef")
    node.hashes += b"h" * 6 * 16
    plant.tree.demote(node, 2)
    assert plant.tree.truncate(node, 3).tolist() == [3, 4, 5]
    assert (bytes(node.key), len(node.hashes), node.device_len) == (key("abc"), 3 * 16, 3)
    assert (plant.tree.device_pages, plant.tree.host_only_pages) == (3, 0)
    assert plant.find("abcdef").pages == 3


def test_emptied_node_leaves_the_tree_and_its_parent_becomes_a_leaf() -> None:
    plant = Plant()
    trunk = plant.add("ab")
    plant.tree.pin(trunk)
    plant.tree.pin(trunk)
    kids = [plant.add("ab" + tail) for tail in ("c", "d", "e")]
    plant.tree.unpin(trunk)
    plant.tree.unpin(trunk)
    for kid in kids:
        assert plant.tree.truncate(kid, 1).tolist() == [kid.pages[0]]
        assert kid.parent is None
    assert not trunk.children
    assert going(plant.tree.device_order) == [trunk]


def test_bare_roots_vanish() -> None:
    plant = Plant()
    node = plant.add("ab")
    plant.tree.drop_root(plant.root)
    assert ROOT in plant.tree.roots
    plant.tree.truncate(node, 2)
    assert plant.tree.roots == {}
    root = plant.tree.hold_root(ROOT)
    plant.tree.hold_root(ROOT)
    plant.tree.drop_root(root)
    assert ROOT in plant.tree.roots
    plant.tree.drop_root(root)
    assert plant.tree.roots == {}


def test_a_held_root_stays_when_its_last_page_goes() -> None:
    plant = Plant()
    plant.tree.truncate(plant.add("ab"), 2)
    assert plant.tree.hold_root(ROOT) is plant.root


# ---- use and order


def test_least_recently_used_leaf_goes_first() -> None:
    plant = Plant()
    a, b, c = (plant.add(tokens) for tokens in ("aa", "bb", "cc"))
    plant.use("aa")
    assert going(plant.tree.device_order) == [b, c, a]


def test_first_in_goes_first_however_often_it_was_used() -> None:
    plant = Plant(policy="fifo")
    a, b, c = (plant.add(tokens) for tokens in ("aa", "bb", "cc"))
    plant.use("aa")
    plant.use("bb")
    assert going(plant.tree.device_order) == [a, b, c]


def test_least_frequently_used_goes_first_and_ties_by_recency() -> None:
    plant = Plant(policy="lfu")
    a, b, c = (plant.add(tokens) for tokens in ("aa", "bb", "cc"))
    for tokens in ("aa", "aa", "cc", "bb"):
        plant.use(tokens)
    assert going(plant.tree.device_order) == [c, b, a]


def test_second_use_protects() -> None:
    plant = Plant(policy="slru")
    a, b, c = (plant.add(tokens) for tokens in ("aa", "bb", "cc"))
    for tokens in ("aa", "aa", "bb", "cc"):
        plant.use(tokens)
    assert going(plant.tree.device_order) == [b, c, a]


def test_lowest_priority_goes_first() -> None:
    plant = Plant(policy="priority")
    a, b, c = plant.add("aa", priority=2), plant.add("bb"), plant.add("cc", priority=1)
    assert going(plant.tree.device_order) == [b, c, a]
    plant.use("bb", priority=3)
    assert going(plant.tree.device_order) == [c, a, b]


def test_a_use_without_a_hit_refreshes_recency_only() -> None:
    plant = Plant(policy="lfu")
    a, b = plant.add("aa"), plant.add("bb")
    plant.tree.touch(a, 0, hits=0)
    assert going(plant.tree.device_order) == [b, a]
    plant.use("bb")
    assert going(plant.tree.device_order) == [a, b]


def test_use_of_a_host_only_child_counts_for_its_device_ancestor_at_once() -> None:
    plant = Plant()
    old = plant.add("ab")
    plant.tree.pin(old)
    plant.tree.pin(old)
    host_only = plant.add("abcd", on_device=False)
    plant.tree.unpin(old)
    plant.tree.unpin(old)
    young = plant.add("xy")
    plant.tree.touch(host_only, 0)
    assert going(plant.tree.device_order) == [young, old]


def test_recency_of_a_child_passes_to_its_parent_when_the_child_goes() -> None:
    plant = Plant()
    trunk = plant.add("ab")
    plant.tree.pin(trunk)
    plant.tree.pin(trunk)
    child = plant.add("abcd")
    plant.tree.unpin(trunk)
    plant.tree.unpin(trunk)
    other = plant.add("xy")
    plant.use("abcd")
    plant.tree.truncate(child, 2)
    assert going(plant.tree.device_order) == [other, trunk]


def test_hits_of_a_child_pass_to_its_parent_once() -> None:
    plant = Plant(policy="lfu")
    trunk = plant.add("ab")
    plant.tree.pin(trunk)
    plant.tree.pin(trunk)
    child = plant.add("abcd")
    plant.tree.unpin(trunk)
    plant.tree.unpin(trunk)
    plant.use("abcd")
    for _ in range(3):  # on its way down, up and down again it must not pay twice
        plant.tree.demote(child, 2)
        assert trunk.device.hits == 1
        plant.tree.promote(child, 2)
    plant.tree.truncate(child, 2)
    assert (trunk.device.hits, trunk.host.hits) == (1, 1)


def test_uses_of_a_split_node_are_counted_once_in_each_tier() -> None:
    for depth in (1, 3, 5):
        plant = Plant(policy="lfu")
        node = plant.add("abcdef")
        plant.use("abcdef")
        plant.use("abcdef")
        plant.tree.demote(node, 3)
        upper = plant.tree.split(node, depth)
        assert upper.device.hits + node.device.hits == 2
        assert upper.host.hits + node.host.hits == 2
        plant.tree.truncate(node, len(node.pages))
        assert (upper.device.hits, upper.host.hits) == (2, 2)
