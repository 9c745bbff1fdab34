"""What paged kernels are told: which pages, in which order, and which prefixes are read once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.paged_plan import arrange, own_tables, placement, plan_tables, prefix_tables
from engine.batch import Batch, Chunk, SharedPrefix

PAGE = 4


def chunk(pages: list[int], start: int | None = None, tokens: int = 1) -> Chunk:
    """New tokens after `start`, or after all pages but the last token of the last."""
    start = len(pages) * PAGE - 1 if start is None else start
    return Chunk(np.zeros(tokens, np.int32), start, np.array(pages, np.int32))


def test_a_table_names_the_pages_of_each_sequence_and_how_full_the_last_is():
    tables = plan_tables([chunk([7, 8, 9], 0, 6), chunk([3], 3), chunk([5, 6], 4, 2)], PAGE, None)
    assert tables.qo_indptr.tolist() == [0, 6, 7, 9]
    assert tables.kv_indptr.tolist() == [0, 2, 3, 5]
    assert tables.kv_indices.tolist() == [7, 8, 3, 5, 6]
    assert tables.last_page_len.tolist() == [2, 4, 2]


def test_pages_that_a_window_hides_from_all_queries_are_left_out():
    pages = list(range(10))
    assert plan_tables([chunk(pages, 23)], PAGE, 8).kv_indices.tolist() == [4, 5]
    assert plan_tables([chunk(pages, 23)], PAGE, 9).kv_indices.tolist() == [3, 4, 5]
    assert plan_tables([chunk(pages, 23, 4)], PAGE, 8).kv_indices.tolist() == [4, 5, 6]
    assert plan_tables([chunk(pages, 24)], PAGE, 1).kv_indices.tolist() == [6]


def test_new_tokens_go_where_their_positions_are():
    at = placement([chunk([7, 8], 2, 4), chunk([3], 0)], PAGE)
    assert at.pages.tolist() == [7, 7, 8, 8, 3]
    assert at.offsets.tolist() == [2, 3, 0, 1, 0]


def test_sequences_that_share_pages_are_put_side_by_side():
    rows = [[1, 2, 3, 9], [5, 6], [1, 2, 3, 8], [7, 4], [1, 2, 3, 10]]
    batch, places = arrange(Batch([chunk(pages) for pages in rows]), PAGE, 1, 4)
    assert list(batch.shared) == [SharedPrefix(0, 3, 3)]
    assert [c.pages.tolist() for c in batch.chunks] == [rows[i] for i in (0, 2, 4, 1, 3)]
    assert places.tolist() == [0, 3, 1, 4, 2]


def test_a_page_that_is_being_written_is_no_part_of_a_prefix():
    batch, _ = arrange(Batch([chunk([1, 2], 7), chunk([1, 2], 7)]), PAGE, 1, 4)
    assert list(batch.shared) == [SharedPrefix(0, 2, 1)]


def test_of_a_short_prefix_of_all_and_a_long_one_of_some_the_one_that_saves_more_is_taken():
    long = list(range(100, 110))
    together = Batch([chunk([1, *long, 2]), chunk([1, *long, 3]), chunk([1, 4])])
    assert list(arrange(together, PAGE, 1, 4)[0].shared) == [SharedPrefix(0, 2, 11)]
    many = Batch([chunk([1, 5, 2]), chunk([1, 5, 3]), *[chunk([1, 6 + i]) for i in range(4)]])
    assert list(arrange(many, PAGE, 1, 4)[0].shared) == [SharedPrefix(0, 6, 1)]


def test_a_prefix_that_saves_too_little_is_not_worth_it_and_only_the_best_few_are_taken():
    batch = Batch([chunk([group, 50, 60 + i]) if group else chunk([0, 70 + i]) for i, group in enumerate([0, 0, 1, 1, 2, 2])])
    assert arrange(batch, PAGE, 9, 4) == (batch, None)
    assert [group.pages for group in arrange(batch, PAGE, 8, 4)[0].shared] == [2, 2]
    assert [group.pages for group in arrange(batch, PAGE, 1, 1)[0].shared] == [2]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=7))
def test_a_cascade_sees_every_page_once_and_nothing_else(tables):
    given_batch = Batch([chunk([page + 3 * depth for depth, page in enumerate(pages)]) for pages in tables])
    batch, places = arrange(given_batch, PAGE, 1, 8)
    at = range(len(tables)) if places is None else places
    assert [batch.chunks[i] for i in at] == list(given_batch.chunks)
    own, upper = own_tables(batch, PAGE), prefix_tables(batch, PAGE, 8)
    assert (np.diff(own.kv_indptr) > 0).all()
    seen = [own.kv_indices[a:b].tolist() for a, b in zip(own.kv_indptr, own.kv_indptr[1:], strict=False)]
    for i in range(8):
        head = upper.kv_indices[upper.kv_indptr[i] : upper.kv_indptr[i + 1]].tolist()
        for row in range(upper.qo_indptr[i], upper.qo_indptr[i + 1]):
            seen[row] = head + seen[row]
    assert seen == [c.pages.tolist() for c in batch.chunks]
