"""The planner's estimates against costs that are known."""

from __future__ import annotations

import pytest

from hicache.policies.planner import RETRY_S, ComputeRates, Planner, meeting_tokens

A, B = 2e-3, 5e-7


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def cost(start: int, tokens: int, step_s: float = 0.0) -> float:
    return step_s + sum(A + B * position for position in range(start, start + tokens))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def planner(clock: Clock) -> Planner:
    return Planner(clock)


def test_nothing_is_predicted_before_anything_was_seen(planner: Planner) -> None:
    assert planner.compute_s(0, 100) is None
    assert planner.read_s(1, 10) is None
    assert planner.load_s(10) is None
    assert planner.load_pays(0, 100, 10)
    assert planner.front_tokens(0, 100, 1.0, 1) is None


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


def test_a_step_costs_something_besides_its_tokens(planner: Planner) -> None:
    for start, tokens in ((0, 512), (512, 64), (4000, 128), (100, 40), (2000, 512)):
        planner.observe_compute([(start, tokens)], cost(start, tokens, 0.08))
    assert planner.compute_s(1000, 64) == pytest.approx(cost(1000, 64, 0.08), rel=1e-3)


def test_two_steps_tell_what_a_step_costs_besides(planner: Planner) -> None:
    planner.observe_compute([(0, 2048)], 4.0)
    planner.observe_compute([(2048, 32)], 0.3)
    step_s, position_s, token_s = planner._compute.rates()
    assert 0.2 < step_s < 0.3
    assert position_s == 0
    assert 1.7e-3 < token_s < 2e-3


def test_reads_cost_by_call_and_by_page_and_are_forgotten_when_they_are_old(planner: Planner, clock: Clock) -> None:
    for calls, pages in ((1, 8), (2, 21), (1, 16), (1, 3), (3, 40)):
        planner.observe_read(calls, pages, 0.05 * calls + 0.001 * pages)
    assert planner.read_s(5, 70) == pytest.approx(5 * 0.05 + 70 * 0.001, rel=1e-3)
    clock.now_s += RETRY_S + 1
    assert planner.read_s(5, 70) is None


def test_a_store_that_becomes_slow_is_known_after_some_reads(planner: Planner) -> None:
    for seconds in [0.01] * 20 + [0.1] * 20:
        planner.observe_read(1, 10, seconds)
    assert planner.read_s(1, 10) == pytest.approx(0.1, rel=0.02)


def test_copying_to_the_device_pays_until_it_is_slower_than_computing(planner: Planner, clock: Clock) -> None:
    planner.observe_compute([(0, 64)], 64 * 2e-3)
    planner.observe_load(10, 10 * 16e-3)
    assert planner.load_pays(0, 160, 10)
    for _ in range(20):
        planner.observe_load(10, 10 * 64e-3)
    assert not planner.load_pays(0, 160, 10)
    clock.now_s += RETRY_S + 1
    assert planner.load_pays(0, 160, 10), "one slow copy would keep the host's pages from being used for ever"


@pytest.mark.parametrize("start", [0, 3000])
@pytest.mark.parametrize("each_s", [1e-5, 1e-3, 4e-3, 1e-1])
@pytest.mark.parametrize("ahead_s", [0.0, 0.5, -0.5])
@pytest.mark.parametrize("rates", [ComputeRates(0.0, B, A), ComputeRates(0.0, 0.0, A), ComputeRates(0.0, B, 0.0)])
def test_front_and_back_meet_where_both_are_there_at_the_same_time(
    rates: ComputeRates, start: int, each_s: float, ahead_s: float
) -> None:
    tokens = 4000
    fronts = [rates.token_s * x + rates.position_s * (start * x + x * x / 2) for x in range(tokens + 1)]
    backs = [ahead_s + each_s * (tokens - x) for x in range(tokens + 1)]
    best = min(range(tokens + 1), key=lambda x: abs(fronts[x] - backs[x]))
    assert meeting_tokens(rates, start, tokens, ahead_s, each_s) == pytest.approx(best, abs=1)


def test_where_both_take_equally_long_more_than_half_is_computed_since_the_front_is_cheaper(planner: Planner) -> None:
    for start, tokens in ((0, 512), (512, 512), (4000, 128), (100, 40), (2000, 512)):
        planner.observe_compute([(start, tokens)], cost(start, tokens))
    front = planner.front_tokens(0, 4000, cost(0, 4000), 1)
    assert front is not None
    assert 2000 < front < 2400
    assert cost(0, round(front)) == pytest.approx(cost(0, 4000) * (4000 - front) / 4000, rel=1e-2)
