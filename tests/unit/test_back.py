"""The back of a hit, put together from batches that are read last to first and land in any order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hicache.back import Back, Batch


def batch(first: int, last: int, *bad: int) -> Batch:
    """Pages [first, last) in slots 100 + page; those in `bad` could not be read."""
    pages = np.arange(first, last, dtype=np.int32)
    return Batch(first, pages + 100, ~np.isin(pages, bad))


@pytest.mark.parametrize("order", list(itertools.permutations([(2, 5), (5, 8), (8, 10)])))
def test_batches_in_any_order_become_one_run(order: tuple[tuple[int, int], ...]) -> None:
    back = Back(10)
    for first, last in order:
        assert not len(back.land(batch(first, last)))
    assert (back.first, back.end, back.torn) == (2, 10, False)
    assert back.take().tolist() == list(range(102, 110))


def test_what_landed_early_is_no_part_of_the_back_until_what_follows_it_has_landed() -> None:
    back = Back(10)
    back.land(batch(2, 5))
    assert (len(back), back.first, back.end) == (0, 10, 10)
    back.land(batch(5, 10))
    assert (back.first, back.end) == (2, 10)


def test_a_bad_page_before_anything_landed_ends_the_hit_there() -> None:
    back = Back(10)
    assert back.land(batch(8, 10, 8)).tolist() == [108, 109]
    assert back.land(batch(5, 8, 6)).tolist() == [106, 107]
    assert not len(back.land(batch(2, 5)))
    assert (back.first, back.end, back.torn) == (2, 6, False)
    assert back.take().tolist() == [102, 103, 104, 105]


def test_a_bad_page_after_something_landed_is_where_reading_ends() -> None:
    back = Back(10)
    back.land(batch(8, 10))
    assert back.land(batch(4, 8, 5)).tolist() == [104, 105]
    assert (back.first, back.end, back.torn) == (6, 10, True)
    assert back.land(batch(2, 4)).tolist() == [102, 103]
    assert back.take().tolist() == [106, 107, 108, 109]


def test_clearing_gives_every_slot_back_once() -> None:
    back = Back(10)
    back.land(batch(8, 10))
    back.land(batch(2, 5))
    assert sorted(back.clear().tolist()) == [102, 103, 104, 108, 109]
    assert not len(back.clear())
