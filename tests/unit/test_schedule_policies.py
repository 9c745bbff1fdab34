"""Who goes next: every policy's order, its bounds, and the theorem behind depth first."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from engine.cli.main import app
from engine.schedule.compare import seed_example
from engine.schedule.prefixes import RERANKED
from engine.schedule.replay import Job, Machine, Replay, Setting
from engine.schedule_policy import make_policy
from engine.scheduler import ASKED
from hicache.errors import ConfigError
from tests.unit.test_schedule_sharing import POLICIES, finish, held, job

if TYPE_CHECKING:
    from pathlib import Path

    from engine.request import Request

ONE = Machine(1, 200, max_running=1, shared_tokens=1)


def order(policy: str, jobs: list[Job], machine: Machine = ONE, **setting: float) -> list[int]:
    return Replay(machine, Setting(policy, **setting)).run(jobs).order  # type: ignore[arg-type]


# ---- orders


def test_fcfs_goes_by_arrival() -> None:
    assert order("fcfs", [job((i, 10)) for i in range(6)]) == [0, 1, 2, 3, 4, 5]


def test_lof_runs_the_longest_possible_answer_first() -> None:
    assert order("lof", [job((i, 10), output=output) for i, output in enumerate((3, 9, 5, 9))]) == [1, 3, 2, 0]


def test_priority_runs_the_highest_first_and_equals_by_arrival() -> None:
    assert order("priority", [job((i, 10), priority=priority) for i, priority in enumerate((0, 5, -1, 5))]) == [1, 3, 0, 2]


def test_random_depends_on_the_seed_alone() -> None:
    jobs = [job((i, 10)) for i in range(12)]
    orders = [order("random", jobs, seed=seed) for seed in (0, 0, 1, 2)]
    assert orders[0] == orders[1]
    assert len({tuple(each) for each in orders}) == 3
    assert all(sorted(each) == list(range(12)) for each in orders)


def test_lpm_runs_the_longest_cached_prefix_first_and_equals_by_arrival() -> None:
    jobs = [job((0, 40)), *(job((0, common), (i, 10), at=0.001) for i, common in enumerate((5, 30, 0, 30), 1))]
    assert order("lpm", jobs) == [0, 2, 4, 1, 3]


def test_lpm_follows_what_requests_bring_into_memory() -> None:
    """At first nobody has anything; once 0 has run, its kin goes before those who came earlier."""
    jobs = [job((0, 20), (9, 5)), job((1, 20)), job((2, 20)), job((0, 20), (8, 5)), job((2, 20), (7, 5))]
    assert order("lpm", jobs) == [0, 3, 1, 2, 4]


def test_routing_key_runs_the_key_that_most_running_requests_have() -> None:
    machine = Machine(1, 1000, max_running=3)
    keys = ("a", "b", "b", "c", "", "b", "a")
    jobs = [job((i, 10), output=4 + i, routing_key=key) for i, key in enumerate(keys)]
    assert order("routing-key", jobs, machine) == [0, 6, 1, 2, 5, 3, 4]


def test_dfs_weight_finishes_the_heaviest_branch_first() -> None:
    families = (0, 1, 1, 2, 2, 2, 1, 0)
    assert order("dfs-weight", [job((family, 20), (10 + i, 5)) for i, family in enumerate(families)]) == [
        1,
        2,
        6,
        3,
        4,
        5,
        0,
        7,
    ]


def test_cache_aware_runs_cheap_requests_first_and_shares_the_cost_of_a_prefix() -> None:
    jobs = [job((0, 60)), *(job((1, 40), (10 + i, 5)) for i in range(4)), job((2, 12))]
    ran = order("cache-aware", jobs)
    assert (ran[0], sorted(ran[1:5]), ran[5]) == (5, [1, 2, 3, 4], 0)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="fcfs, lpm"):
        make_policy("best", Replay(ONE, Setting("fcfs")).cache)


# ---- many waiting


def matched(replay: Replay) -> list[Request]:
    """Record every match of a waiting request from now on."""
    seen: list[object] = []
    match = replay.cache.cached_pages

    def counted(lease: object) -> int:
        seen.append(lease)
        return match(lease)  # type: ignore[arg-type]

    replay.cache.cached_pages = counted  # type: ignore[method-assign, assignment]
    return seen  # type: ignore[return-value]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "cache-aware", "fcfs"])
def test_a_step_matches_no_more_requests_however_many_wait(policy: str) -> None:
    replay = Replay(Machine(16, 4096, max_running=8), Setting(policy, max_wait_s=1e9))
    for i in range(3000):
        replay.add(i, job((i % 50, 32), (100 + i, 32), output=3))
    seen = matched(replay)
    for _ in range(60):
        seen.clear()
        replay.step()
        assert len(seen) <= 4 * ASKED
    assert len(replay.scheduler.waiting) > 2000


def test_lpm_stays_lpm_with_ten_thousand_waiting() -> None:
    replay = Replay(Machine(16, 32_000, max_running=1, prefill_tokens=64), Setting("lpm", max_wait_s=1e9))
    replay.run([job((1, 64))])
    for i in range(1, 10_001):
        replay.add(i, job((10 + i, 34), output=1))
    last = replay.add(10_001, job((1, 64), (2, 10)))
    for _ in range(10_001 // ASKED + 1):
        replay.step()
    while last in replay.scheduler.waiting:
        assert replay.step()
        assert len(replay.order) < 2 * (10_001 // ASKED + 2)
    assert replay.order[-1] == 10_001


PROMPTS = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=3), min_size=2, max_size=16)


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.integers(20, 60))
def test_lpm_names_a_request_whose_prefix_is_longest_as_a_match_of_all_would(
    prompts: list[list[tuple[int, int]]], tokens: int
) -> None:
    replay = Replay(Machine(1, tokens, max_running=2, shared_tokens=1), Setting("lpm", max_wait_s=1e9))
    policy = replay.scheduler._policy
    requests = [replay.add(i, job(*parts, output=2)) for i, parts in enumerate(prompts)]
    while not replay.scheduler.idle:
        assert replay.step() or replay.cache.in_flight
        named = policy.first(replay.scheduler.running)
        if named is not None:
            queue = policy._policy._queue  # type: ignore[attr-defined]
            longest = max(replay.cache.cached_pages(each.lease) for each in requests if each in queue)
            assert replay.cache.cached_pages(named.lease) == longest


def test_ranks_are_renewed_within_a_few_steps_when_many_prefixes_grow_at_once() -> None:
    replay = Replay(Machine(16, 32_000, max_running=1, shared_tokens=1_000_000), Setting("lpm", max_wait_s=1e9))
    for i in range(4 * RERANKED):
        replay.add(i, job((0, 160), (i + 1, 20), output=40))
    for _ in range(4 * RERANKED // ASKED + 8):
        replay.step()
    queue, trie = (getattr(replay.scheduler._policy._policy, name) for name in ("_queue", "_trie"))  # type: ignore[attr-defined]
    assert all(queue.rank(request) == -10 for request in replay.scheduler.waiting)
    assert all(trie.known_pages(request) == 10 for request in replay.scheduler.waiting)


# ---- nobody starves


def feed(policy: str, max_wait_s: float, until_s: float) -> Replay:
    """One cold request, and hot ones for ever: as many as there is room for, and more."""
    replay = Replay(Machine(16, 4000, max_running=2), Setting(policy, max_wait_s=max_wait_s))
    replay.run([job((1, 320), priority=1)])
    cold = replay.add(1, job((2, 1500), output=2))
    serial = itertools.count(2)
    while cold in replay.scheduler.waiting and replay.clock.now < until_s:
        while len(replay.scheduler.waiting) < 20:
            replay.add(number := next(serial), job((1, 320), (number, 20), priority=1, output=30))
        replay.step()
    return replay


@pytest.mark.parametrize("policy", ["lpm", "cache-aware", "priority", "lof"])
def test_hot_requests_for_ever_keep_a_cold_one_waiting_no_longer_than_the_bound(policy: str) -> None:
    assert policy == "cache-aware" or feed(policy, 1e9, 8.0).clock.now >= 8.0, "without a bound it waits for ever"
    replay = feed(policy, 2.0, 8.0)
    assert replay.clock.now < 0.3 + 2.0 + 1.5  # start, bound, and one running request's answer


def test_of_two_admissions_one_is_the_policys_own_however_many_are_overdue() -> None:
    jobs = [job((i, 10), priority=i) for i in range(8)]
    assert order("priority", jobs, max_wait_s=1e-9) == [7, 0, 6, 1, 5, 2, 4, 3]


# ---- depth first


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=5))
def test_dfs_weight_reuses_as_much_as_any_order_when_the_cache_holds_the_longest_request(prompts: list[list[int]]) -> None:
    jobs = [Job(0.0, np.array(prompt, np.int32), 1) for prompt in prompts]
    machine = Machine(1, max(len(prompt) for prompt in prompts) + 1, max_running=1, shared_tokens=1)
    best = max(sum(Replay(machine, Setting("fcfs")).run(list(each)).cached) for each in itertools.permutations(jobs))
    assert sum(Replay(machine, Setting("dfs-weight")).run(jobs).cached) == best


def test_of_three_interleaved_families_fcfs_reuses_little_lpm_all_and_they_meet_with_room() -> None:
    reused = {(row.workload, row.policy): row.reused for row in seed_example(["fcfs", "lpm", "dfs-weight", "cache-aware"])}
    assert reused["families, 40 tokens", "fcfs"] < 0.5
    for policy in ("lpm", "dfs-weight", "cache-aware"):
        assert reused["families, 40 tokens", policy] == pytest.approx(0.702, abs=0.001)
    assert {reused["families, 80 tokens", policy] for policy in ("fcfs", "lpm", "dfs-weight", "cache-aware")} == {0.702}


# ---- retraction


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_retracted_request_had_computed_comes_back_from_the_host(policy: str) -> None:
    replay = Replay(Machine(1, 120, host_tokens=1000, max_running=6), Setting(policy))
    jobs = [job((i, 20), output=60) for i in range(6)]
    report = replay.run(jobs)
    assert report.retracted > 0
    assert replay.tokens_computed == sum(len(each.tokens) + each.output_tokens - 1 for each in jobs)
    moved = replay.cache.stats()["hicache_transfer_pages_total"]
    assert isinstance(moved, dict)
    assert moved["load_back"] > 0
    assert held(replay) == (0, 0)
    finish(replay)


# ---- the command


def test_bench_schedule_prints_a_json_line_a_figure() -> None:
    result = CliRunner().invoke(app, ["bench", "schedule", "--json", "--waiting", "20", "--policy", "lpm"])
    assert result.exit_code == 0, result.output
    (figure,) = [json.loads(line) for line in result.output.splitlines()]
    assert (figure["policy"], figure["waiting"]) == ("lpm", 20)


def test_bench_schedule_replays_slices_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 100, "output_length": 4, "hash_ids": [0, 1 + i % 3, 10 + i, 20 + i]}
        for i in range(9)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["bench", "schedule", "--json", "--trace", str(trace), "--seeds", "1", "--policy", "fcfs"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (figure,) = [json.loads(line) for line in result.output.splitlines()]
    assert (figure["workload"], figure["policy"]) == ("trace, load 0.9", "fcfs")
    assert figure["reused"] == pytest.approx((8 * 25 + 6 * 25) / 900, abs=0.001)


def test_bench_schedule_refuses_an_unknown_policy_and_a_missing_trace() -> None:
    for wrong in (["--policy", "best"], ["--trace", "/nowhere.jsonl"]):
        assert CliRunner().invoke(app, ["bench", "schedule", *wrong]).exit_code == 2
