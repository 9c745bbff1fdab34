"""The adaptive policy: cells, learning, ghosts, and what it makes of traffic."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache import adaptive
from hicache.adaptive import AdaptiveOrder
from hicache.ages import OCTAVES, Ages, cell_of, octaves_of
from hicache.eviction import Usage
from hicache.ghosts import Ghosts
from hicache.learner import ABANDONED, WARM_UP, Groups, Learner, Trait, octave4, worth_of
from hicache.simulate import Sizes, replay
from hicache.traces import Request, Trace

SECOND = 1_000_000


def anyone(leaf: object) -> bool:
    return True


def tokens(*pages: int) -> bytes:
    return np.array(pages, np.int32).tobytes()


@pytest.mark.parametrize("seed", range(5))
def test_ages_agree_with_a_plain_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    ages: Ages[int] = Ages()
    plain: dict[int, tuple[int, int]] = {}
    for _ in range(800):
        item, row = rng.randrange(40), (rng.randrange(100), rng.randrange(3))
        if rng.random() < 0.7:
            assert ages.put(item, *row) == (plain.get(item) != row)
            plain[item] = row
        else:
            ages.discard(item)
            plain.pop(item, None)
        since_us, code = ages.columns()
        rows = zip(since_us.tolist(), code.tolist(), strict=True)
        assert {ages.at(at): each for at, each in enumerate(rows)} == plain
        assert (len(ages), set(ages)) == (len(plain), set(plain))
        del since_us, code


def test_ages_fall_into_half_octaves_of_seconds_and_one() -> None:
    ages_s = [0, 0.3, 0.5, 1.1, 3.2, 100, 10**6, 10**9]
    assert [cell_of(int(SECOND * age_s)) for age_s in ages_s] == [0, 0, 1, 2, 4, 13, 39, OCTAVES - 1]
    cells = octaves_of(np.array([int(SECOND * age_s) for age_s in ages_s]))
    assert [int(cell) for cell in cells] == [cell_of(int(SECOND * age_s)) for age_s in ages_s]


def test_octaves_of_4() -> None:
    assert [octave4(value, 8) for value in (0, 3, 4, 15, 16, 63, 64, 10**9)] == [1, 1, 2, 2, 3, 3, 4, 7]


def test_traits_beyond_the_most_groups_count_as_what_they_share() -> None:
    groups = Groups()
    traits = [
        Trait(kind, tail, gap, answer) for kind in range(6) for tail in range(12) for gap in range(8) for answer in range(8)
    ]
    numbers = [groups.number(trait) for trait in traits]
    assert len(set(numbers)) == len(groups)
    for number, trait in zip(numbers, traits, strict=True):
        assert groups.traits[number] in (trait, Trait(trait.kind, trait.tail))
    assert groups.number(traits[0]) == numbers[0]


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


def order_of(worths: dict[str, float]) -> AdaptiveOrder[str]:
    """Leaves of groups whose worth is set, the same at every age."""
    learner = Learner()
    for _ in range(WARM_UP):
        learner.tick(0)
    table = learner.worth()
    assert table is not None
    order: AdaptiveOrder[str] = AdaptiveOrder(learner)
    for group, (leaf, worth) in enumerate(worths.items()):
        table[2 * group] = worth
        order.add(leaf, usage_of(group))
    return order


def usage_of(group: int) -> Usage:
    usage = Usage()
    usage.group = group
    return usage


@pytest.mark.parametrize("window", [1 << 16, 16])
def test_the_least_worth_goes_first(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "WINDOW", window)
    monkeypatch.setattr(adaptive, "PART", 4)
    leaves = [str(at) for at in range(40)]
    order = order_of({leaf: float(worth) for leaf, worth in zip(leaves, np.random.default_rng(0).permutation(40), strict=True)})
    gone: list[str] = []
    while (first := order.pick(anyone)) is not None:
        order.discard(first)
        gone.append(first)
    assert sorted(gone) == sorted(leaves)
    if window > len(leaves):
        ranked = order_of({leaf: float(at) for at, leaf in enumerate(gone)})
        assert ranked.pick(anyone) == gone[0]


def test_a_leaf_that_is_used_after_it_was_ranked_stays() -> None:
    order = order_of({"a": 1.0, "b": 2.0, "c": 3.0})
    assert order.pick(anyone) == "a"
    order.add("a", usage_of(2))
    assert order.pick(anyone) == "b"


def test_a_last_page_is_worth_less_while_last_pages_rarely_come_back() -> None:
    learner = Learner()
    order: AdaptiveOrder[str] = AdaptiveOrder(learner)
    for _ in range(WARM_UP):
        learner.tick(0)
        learner.note_end(came_back=False)
    order.add("front", Usage(0))
    end = Usage(1)
    end.ends = True
    order.add("end", end)
    assert order.pick(anyone) == "end"


@pytest.mark.parametrize("seed", range(3))
def test_the_same_counts_are_worth_the_same_however_often_they_are_fitted(seed: int) -> None:
    learner, rng = Learner(), np.random.default_rng(seed)
    for kind, tail, gap, answer in rng.integers((6, 6, 6, 6), size=(100, 4)).tolist():
        group = learner.groups.number(Trait(kind, tail, gap, answer))
        learner._returns[group, rng.integers(10, 20, 3)] = rng.integers(0, 100, 3)
        learner._risk_s[group, :20] = 1000 * rng.random(20)
    worths = []
    for fits in (3, 60):
        for _ in range(fits):
            learner._fit()
        assert learner.groups.worth is not None
        worths.append(learner.groups.worth.copy())
    assert worths[1] == pytest.approx(worths[0], rel=0.1)


def test_worth_of_a_constant_hazard_is_that_hazard() -> None:
    assert worth_of(np.full((2, OCTAVES), 0.01)) == pytest.approx(np.full((2, OCTAVES), 0.01), rel=1e-3)


def test_worth_looks_ahead_to_a_time_of_many_returns() -> None:
    hazard = np.full((1, OCTAVES), 1e-4)
    hazard[0, 12] = 0.1
    worth = worth_of(hazard)[0]
    assert worth[12] == pytest.approx(0.1, rel=1e-3)
    assert worth[11] > worth[8] > 1e-4
    assert worth[13] == pytest.approx(1e-4, rel=1e-3)


def group_of(ghosts: Ghosts, *trait: int) -> int:
    return ghosts._learner.groups.number(Trait(*trait))


def test_conversations_that_go_on_are_another_group_than_those_that_do_not() -> None:
    ghosts = Ghosts(1, 100, Learner(), counts=False)
    first = ghosts.see(b"root", tokens(1, 2, 3, 4), 4, 0)
    second = ghosts.see(b"root", tokens(1, 2, 3, 4, 5, 6), 6, 5 * SECOND)
    assert (first.goes_on, first.shared, first.group) == (False, None, group_of(ghosts, 0, 2))
    assert (second.goes_on, second.shared, second.group) == (True, None, group_of(ghosts, 2, 2, 2))


def test_the_length_of_the_answer_tells_groups_apart() -> None:
    ghosts = Ghosts(1, 100, Learner(), counts=False)
    seen = ghosts.see(b"root", tokens(1, 2, 3, 4), 4, 0)
    assert ghosts.answered(seen.visit, 20) == group_of(ghosts, 0, 2, 0, 3)


def test_a_conversation_that_a_request_branches_off_from_is_abandoned() -> None:
    ghosts = Ghosts(1, 100, Learner(), counts=False)
    ghosts.see(b"root", tokens(1, 2, 3, 4, 5), 5, 0)
    assert ghosts.see(b"root", tokens(1, 2, 8, 9), 4, SECOND).abandoned == group_of(ghosts, ABANDONED, 3)
    assert ghosts.see(b"root", tokens(1, 2, 7, 7), 4, SECOND).abandoned is None


def test_a_turn_may_go_on_within_the_last_page() -> None:
    ghosts = Ghosts(1, 100, Learner(), counts=False)
    ghosts.see(b"root", tokens(1, 2, 3, 4), 4, 0)
    assert ghosts.see(b"root", tokens(1, 2, 3, 99, 5), 5, SECOND).goes_on


def test_a_branch_shares_what_lies_before_it() -> None:
    ghosts = Ghosts(1, 100, Learner(), counts=False)
    ghosts.see(b"root", tokens(1, 2, 3, 4, 5), 5, 0)
    branch = ghosts.see(b"root", tokens(1, 2, 8, 9), 4, SECOND)
    assert branch.shared == Groups.shared(2, None)
    assert branch.group == group_of(ghosts, 1, 1)
    again = ghosts.see(b"root", tokens(1, 2, 7, 7), 4, 3 * SECOND)
    assert again.shared == Groups.shared(3, 2.0)
    assert again.group == group_of(ghosts, 0, 1)


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
    assert ghosts.see(b"root", b"", 0, 0).group == group_of(ghosts, 0, 0)
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


def edits(seed: int) -> Trace:
    """Conversations whose last turn is often edited: what was there before is never asked for again."""
    rng = random.Random(seed)
    ids = iter(range(1, 1 << 30))
    requests: list[Request] = []
    open_ones = [[next(ids) for _ in range(4)] for _ in range(60)]
    for at in range(6000):
        blocks = open_ones.pop(rng.randrange(30))
        if rng.random() < 0.5:
            del blocks[-4:]
        blocks += [next(ids) for _ in range(5)]
        open_ones.append(blocks if len(blocks) < 40 else [next(ids) for _ in range(4)])
        requests.append(Request(float(at), len(blocks), 1, np.array(blocks, np.int32)))
    return Trace(requests, next(ids) - 1)


def test_adaptive_lets_go_what_was_abandoned() -> None:
    trace = edits(1)
    lru, learned = (replay(trace, Sizes(900), policy).hit_share for policy in ("lru", "adaptive"))
    assert learned > lru + 0.01


def test_groups_of_shared_prefixes_are_negative_and_no_two_alike() -> None:
    made = {Groups.shared(uses, gap) for uses in (2, 3, 5, 9, 17, 1000) for gap in (None, 1.0, 5.0, 1e6)}
    assert len(made) == 24
    assert max(made) < 0
