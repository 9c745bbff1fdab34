"""The adaptive policy: cells, learning, ghosts, and what it makes of traffic."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache.adaptive import CELLS, GROUPS, OCTAVES, AdaptiveOrder, Cells, Learner, group_of, octave_of, worth_of
from hicache.eviction import SHARED, Usage
from hicache.ghosts import Ghosts
from hicache.simulate import Sizes, replay
from hicache.traces import Request, Trace

SECOND = 1_000_000


def anyone(leaf: object) -> bool:
    return True


def tokens(*pages: int) -> bytes:
    return np.array(pages, np.int32).tobytes()


@pytest.mark.parametrize("seed", range(5))
def test_cells_agree_with_a_plain_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    cells: Cells[int] = Cells()
    plain: dict[int, tuple[int, int]] = {}
    now = 0
    for _ in range(800):
        now += rng.randrange(3 * SECOND)
        item, group, since = rng.randrange(40), rng.randrange(GROUPS), now - rng.randrange(1 + now // 2)
        if rng.random() < 0.7:
            cells.add(item, group, since, now)
            plain[item] = (group, since)
        else:
            cells.discard(item)
            plain.pop(item, None)
        cells.age(now)
        if rng.random() < 0.05:
            cells.arrange(rng.sample(range(CELLS), CELLS))
        by_cell: dict[int, list[tuple[int, int]]] = {}
        for each, (its_group, its_since) in plain.items():
            by_cell.setdefault(its_group * OCTAVES + octave_of(now - its_since), []).append((its_since, each))
        assert sorted(cells) == sorted(plain)
        assert set(cells.filled()) == set(by_cell)
        for cell, members in by_cell.items():
            entry = cells.first(cell, anyone)
            assert entry is not None
            assert entry[0] == min(members)[0]


def test_before_anything_is_learned_the_oldest_goes() -> None:
    learner = Learner()
    order: AdaptiveOrder[str] = AdaptiveOrder(learner)
    learner.tick(500 * SECOND)
    for leaf, since_s in (("b", 20), ("a", 3), ("c", 400)):
        order.add(leaf, Usage(since_s * SECOND))
    gone = []
    while (leaf := order.pick(anyone)) is not None:
        order.discard(leaf)
        gone.append(leaf)
    assert gone == ["a", "b", "c"]


def test_leaves_that_may_not_go_are_passed_over_and_stay() -> None:
    order: AdaptiveOrder[str] = AdaptiveOrder(Learner())
    for at, leaf in enumerate("abc"):
        order.add(leaf, Usage(at))
    assert order.pick(lambda leaf: leaf == "c") == "c"
    assert order.pick(anyone) == "a"
    assert len(order) == 3


def test_worth_of_a_constant_hazard_is_that_hazard() -> None:
    assert worth_of(np.full((2, OCTAVES), 0.01)) == pytest.approx(np.full((2, OCTAVES), 0.01), rel=1e-3)


def test_worth_looks_ahead_to_a_time_of_many_returns() -> None:
    hazard = np.full((1, OCTAVES), 1e-4)
    hazard[0, 12] = 0.1
    worth = worth_of(hazard)[0]
    assert worth[12] == pytest.approx(0.1, rel=1e-3)
    assert worth[11] > worth[8] > 1e-4
    assert worth[13] == pytest.approx(1e-4, rel=1e-3)


def test_conversations_that_go_on_are_another_group_than_those_that_do_not() -> None:
    ghosts = Ghosts(1, 100, Learner(), counts=False)
    first = ghosts.see(b"root", tokens(1, 2, 3, 4), 4, 0)
    second = ghosts.see(b"root", tokens(1, 2, 3, 4, 5, 6), 6, SECOND)
    assert (first.goes_on, first.branches, first.group) == (False, False, group_of(0, 3))
    assert (second.goes_on, second.branches, second.group) == (True, False, group_of(2, 2))


def test_a_turn_may_go_on_within_the_last_page() -> None:
    ghosts = Ghosts(1, 100, Learner(), counts=False)
    ghosts.see(b"root", tokens(1, 2, 3, 4), 4, 0)
    assert ghosts.see(b"root", tokens(1, 2, 3, 99, 5), 5, SECOND).goes_on


def test_a_branch_shares_what_lies_before_it() -> None:
    ghosts = Ghosts(1, 100, Learner(), counts=False)
    ghosts.see(b"root", tokens(1, 2, 3, 4, 5), 5, 0)
    branch = ghosts.see(b"root", tokens(1, 2, 8, 9), 4, SECOND)
    assert branch.branches
    assert branch.group == group_of(1, 1)
    assert ghosts.see(b"root", tokens(1, 2, 7, 7), 4, SECOND).group == group_of(0, 1)


def test_ghosts_count_uses_of_every_page() -> None:
    ghosts = Ghosts(1, 100, Learner(), counts=True)
    seen = [
        ghosts.see(b"root", tokens(*pages), len(pages), 0).counts for pages in ([1, 2, 3], [1, 2, 3], [1, 2, 9, 9], [1, 2, 3])
    ]
    assert [counts.tolist() for counts in seen if counts is not None] == [[1, 1, 1], [2, 2, 2], [3, 3, 1, 1], [4, 4, 1]]


def test_ghosts_are_bounded_and_forget_the_oldest() -> None:
    ghosts = Ghosts(1, 10, Learner(), counts=True)
    for first in range(50):
        ghosts.see(b"root", tokens(first, 100, 101, 102), 4, first * SECOND)
    assert ghosts._tree.host_only_pages <= 10
    assert len(ghosts._visits) <= 10
    counts = ghosts.see(b"root", tokens(0, 100, 101, 102), 4, 99 * SECOND).counts
    assert counts is not None
    assert counts.tolist() == [1, 1, 1, 1]


def test_a_request_of_no_whole_page_leaves_nothing() -> None:
    ghosts = Ghosts(1, 10, Learner(), counts=True)
    assert ghosts.see(b"root", b"", 0, 0).group == group_of(0, 0)
    assert ghosts._tree.roots == {}


def chatter(seed: int) -> Trace:
    """Conversations that come back, between as many prompts, as long, that never do. A short first prompt tells which."""
    rng = random.Random(seed)
    ids = iter(range(1, 1 << 30))
    requests: list[Request] = []
    open_ones: list[list[int]] = []
    for at in range(5000):
        kind = rng.random()
        if kind < 0.5 or len(open_ones) < 40:
            blocks = [next(ids) for _ in range(30 if kind < 0.4 else 3)]
            if len(blocks) == 3:
                open_ones.append(blocks)
        else:
            blocks = open_ones.pop(rng.randrange(min(30, len(open_ones))))
            blocks.append(next(ids))
            if len(blocks) < 12:
                open_ones.append(blocks)
        requests.append(Request(float(at), len(blocks), 1, np.array(blocks, np.int32)))
    return Trace(requests, next(ids) - 1)


def test_adaptive_keeps_conversations_that_come_back() -> None:
    trace = chatter(3)
    lru, adaptive = (replay(trace, Sizes(300), policy).hit_share for policy in ("lru", "adaptive"))
    assert adaptive > 1.3 * lru


def test_shared_is_the_last_group() -> None:
    assert SHARED % GROUPS == GROUPS - 1
