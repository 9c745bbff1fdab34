"""Slots have one owner; pages are views of the pool's memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache.errors import ConfigError
from hicache.pools import DevicePool, HostPool, SlotPool


def test_free_and_owned_add_up_to_the_capacity() -> None:
    pool = SlotPool(5)
    first = pool.take(2)
    second = pool.take(3)
    assert (pool.free, pool.owned) == (0, 5)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    pool.give(first)
    assert (pool.free, pool.owned) == (2, 3)


def test_fresh_pool_hands_out_neighbours_in_order() -> None:
    pool = SlotPool(6)
    assert pool.take(3).tolist() == [0, 1, 2]
    assert pool.take(2).tolist() == [3, 4]


def test_slots_given_back_are_handed_out_in_the_order_they_had() -> None:
    pool = SlotPool(6)
    slots = pool.take(4)
    pool.give(slots)
    assert pool.take(4).tolist() == slots.tolist()


def test_taking_more_than_is_free_asserts_and_takes_nothing() -> None:
    pool = SlotPool(2)
    with pytest.raises(AssertionError, match="3 slots asked, 2 free"):
        pool.take(3)
    assert pool.free == 2


@pytest.mark.parametrize("again", [[1], [0, 1], [2, 2]], ids=["freed before", "one of two freed before", "twice at once"])
def test_double_free_asserts(again: list[int]) -> None:
    pool = SlotPool(4)
    pool.take(4)
    pool.give(np.array([1], np.int32))
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give(np.array(again, np.int32))


def test_taken_slots_are_an_own_array() -> None:
    pool = SlotPool(4)
    slots = pool.take(2)
    slots[:] = 9
    assert pool.take(2).tolist() == [2, 3]
    assert slots.base is None


def test_nothing_can_be_taken_and_given() -> None:
    pool = SlotPool(0)
    pool.give(pool.take(0))
    assert (pool.free, pool.owned, pool.capacity) == (0, 0, 0)


def test_host_page_is_a_writable_view_of_one_page() -> None:
    pool = HostPool(3, 4)
    pool.data[:] = 0
    pool.page(1)[:] = b"abcd"
    assert pool.data.tolist() == [[0] * 4, [97, 98, 99, 100], [0] * 4]


def test_device_pool_is_bytes_of_pages() -> None:
    pool = DevicePool(3, 8)
    assert pool.data.shape == (3, 8)
    assert pool.data.dtype is torch.uint8


def test_a_pool_too_large_for_memory_is_a_clear_refusal() -> None:
    with pytest.raises(ConfigError, match=r"no memory for a host pool of .* pages .*hicache-ratio"):
        HostPool(1 << 40, 1 << 20)
    with pytest.raises(ConfigError, match=r"no memory for a device pool of .*max-total-tokens"):
        DevicePool(1 << 40, 1 << 20)
