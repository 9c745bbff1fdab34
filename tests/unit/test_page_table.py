"""Rows of logical pages: handed out once, taken back only when nothing refers to them."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.page_table import NOT_STORED, NOWHERE, STORED, PageTable


def test_rows_come_fresh_and_in_order() -> None:
    table = PageTable(5)
    assert table.new(3).tolist() == [0, 1, 2]
    assert table.new(2).tolist() == [3, 4]
    assert table.used == 5


def test_a_released_row_comes_back_blank() -> None:
    table = PageTable(1)
    (row,) = table.new(1)
    table.hits[row], table.stored[row] = 7, STORED
    table.release([row])
    assert table.used == 0
    (again,) = table.new(1)
    assert again == row
    assert (table.hit[row], table.store[row], table.load[row]) == (0, NOT_STORED, 0)
    assert (table.device_slot[row], table.host_slot[row]) == (NOWHERE, NOWHERE)


def test_columns_and_their_views_share_memory() -> None:
    table = PageTable(4)
    table.device_slots[[1, 2]] = [8, 9]
    table.host_slot[3] = 5
    assert table.device_slot.tolist() == [NOWHERE, 8, 9, NOWHERE]
    assert table.host_slots[3] == 5


def test_holds_of_the_same_page_add_up() -> None:
    table = PageTable(3)
    rows = np.array(table.new(3), np.int32)
    table.hold_host(rows[:2])
    table.hold_host(rows[1:])
    assert table.host_busys.tolist() == [1, 2, 1]
    table.let_go_host(rows[:2])
    assert table.host_busys.tolist() == [0, 1, 1]
    assert table.device_busys.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("device_slot", 0, "device slot"),
        ("host_slot", 0, "host slot"),
        ("device_busy", 1, "backed up"),
        ("host_busy", 1, "stored"),
    ],
)
def test_a_row_in_use_is_not_taken_back(column: str, value: int, what: str) -> None:
    table = PageTable(2)
    (row,) = table.new(1)
    getattr(table, column)[row] = value
    with pytest.raises(AssertionError, match=what):
        table.release([row])
    assert table.used == 1


def test_more_pages_than_slots_asserts() -> None:
    table = PageTable(2)
    table.new(2)
    with pytest.raises(AssertionError, match="more logical pages than slots"):
        table.new(1)
