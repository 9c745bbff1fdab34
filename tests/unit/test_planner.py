"""The planner's estimates against costs that are known."""

from __future__ import annotations

import pytest

from hicache.policies.planner import RETRY_S, Planner

A, B = 2e-3, 5e-7


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def cost(start: int, tokens: int) -> float:
    return sum(A + B * position for position in range(start, start + tokens))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def planner(clock: Clock) -> Planner:
    return Planner(clock)


def test_nothing_is_predicted_before_anything_was_seen(planner: Planner) -> None:
    assert planner.compute_s(0, 100) is None
    assert planner.read_s(10) is None
    assert planner.pays(0, 100, 10)


def test_compute_cost_grows_with_the_position_as_it_was_seen_to(planner: Planner) -> None:
    for start, tokens in ((0, 512), (512, 512), (4000, 128), (100, 40), (2000, 512)):
        planner.observe_compute([(start, tokens)], cost(start, tokens))
    assert planner.compute_s(0, 1000) == pytest.approx(cost(0, 1000), rel=1e-6)
    assert planner.compute_s(8000, 300) == pytest.approx(cost(8000, 300), rel=1e-6)


def test_a_step_of_several_chunks_counts_as_their_sum(planner: Planner) -> None:
    for start in (0, 1000, 5000):
        planner.observe_compute([(start, 64), (200, 1), (3000, 100)], cost(start, 64) + cost(200, 1) + cost(3000, 100))
    assert planner.compute_s(700, 200) == pytest.approx(cost(700, 200), rel=1e-6)


def test_steps_at_one_place_give_a_mean(planner: Planner) -> None:
    for _ in range(3):
        planner.observe_compute([(0, 64)], 0.64)
    assert planner.compute_s(0, 100) == pytest.approx(1.0)


def test_steps_of_a_few_tokens_are_no_measure(planner: Planner) -> None:
    planner.observe_compute([(100, 1)] * 8, 0.05)
    assert planner.compute_s(0, 100) is None


def test_reading_pays_until_it_is_slower_than_computing_and_is_tried_again_later(planner: Planner, clock: Clock) -> None:
    planner.observe_compute([(0, 64)], 64 * 2e-3)
    planner.observe_read(10, 10 * 16e-3)
    assert planner.pays(0, 160, 10)
    for _ in range(20):
        planner.observe_read(10, 10 * 64e-3)
    assert planner.read_s(10) == pytest.approx(0.64, rel=1e-2)
    assert not planner.pays(0, 160, 10)
    clock.now_s += RETRY_S + 1
    assert planner.pays(0, 160, 10)
