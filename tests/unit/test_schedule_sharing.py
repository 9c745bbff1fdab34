"""Prefixes that are being computed are waited for, and nobody waits for ever."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Phase, Request
from engine.schedule.replay import Job, Machine, Replay, Setting
from engine.schedule.workloads import burst
from engine.schedule_policy import SchedulePolicyName

POLICIES = get_args(SchedulePolicyName)
MACHINE = Machine(16, 48_000)


def job(*parts: tuple[int, int], at: float = 0.0, output: int = 4, **fields: object) -> Job:
    """A prompt made of (kind, length) parts: equal kinds begin with equal tokens."""
    tokens = [np.arange(length) + 100_000 * kind for kind, length in parts]
    return Job(at, np.concatenate(tokens).astype(np.int32), output, **fields)  # type: ignore[arg-type]


def finish(replay: Replay) -> None:
    for _ in range(10_000):
        if replay.scheduler.idle:
            return
        assert replay.step() or replay.cache.in_flight, "requests are stuck"
    raise AssertionError("requests don't end")


def held(replay: Replay) -> tuple[float, float]:
    """Device pages pinned, and owned by requests."""
    pages = replay.cache.stats()["hicache_pages"]
    assert isinstance(pages, dict)
    return pages["device/pinned"], pages["device/private"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_burst_computes_its_common_prefix_once(policy: str) -> None:
    report = Replay(MACHINE, Setting(policy)).run(burst(requests=32, prefix=2000, own=20))
    assert report.prompt_tokens_computed == 2000 + 32 * 20


@pytest.mark.parametrize("policy", POLICIES)
def test_those_who_come_while_it_is_computed_wait_for_it_too(policy: str) -> None:
    jobs = [each._replace(arrival_s=0.002 * i) for i, each in enumerate(burst(requests=16, prefix=2000, own=20))]
    report = Replay(MACHINE._replace(prefill_tokens=128), Setting(policy)).run(jobs)
    assert report.prompt_tokens_computed == 2000 + 16 * 20


def test_tenants_with_different_salts_share_nothing() -> None:
    jobs = [each._replace(salt=str(i % 2)) for i, each in enumerate(burst(requests=8, prefix=1600, own=20))]
    assert Replay(MACHINE, Setting("fcfs")).run(jobs).prompt_tokens_computed == 2 * 1600 + 8 * 20


def test_a_short_common_prefix_is_not_waited_for() -> None:
    replay = Replay(MACHINE, Setting("fcfs"))
    requests = [replay.add(i, job((0, 16), (i + 1, 100))) for i in range(4)]
    replay.step()
    assert all(request.phase is Phase.RUNNING for request in requests)


def test_a_follower_holds_up_nobody_behind_it() -> None:
    replay = Replay(MACHINE._replace(prefill_tokens=4096), Setting("fcfs"))
    requests = [replay.add(i, job((0 if i < 2 else 1, 2000), (i, 20))) for i in range(3)]
    replay.step()
    assert [request.phase for request in requests] == [Phase.RUNNING, Phase.WAITING, Phase.RUNNING]
    finish(replay)
    assert replay.prompt_tokens_computed == 2020 + 20 + 2020


@pytest.mark.parametrize("when", [1, 3])
def test_when_a_pioneer_goes_its_followers_go_on_with_what_it_computed(when: int) -> None:
    replay = Replay(MACHINE._replace(prefill_tokens=512), Setting("fcfs"))
    requests = [replay.add(i, each) for i, each in enumerate(burst(requests=8, prefix=2048, own=20))]
    for _ in range(when):
        replay.step()
    replay.scheduler.remove(requests[0])
    finish(replay)
    assert replay.prompt_tokens_computed == 2048 + 7 * 20
    assert held(replay) == (0, 0)


def test_an_aborted_follower_is_not_woken() -> None:
    replay = Replay(MACHINE._replace(prefill_tokens=512), Setting("lpm"))
    requests = [replay.add(i, each) for i, each in enumerate(burst(requests=3, prefix=2048, own=20))]
    replay.step()
    assert requests[1].phase is Phase.WAITING
    replay.scheduler.remove(requests[1])
    finish(replay)
    assert sorted(replay.first_token_s) == [0, 2]
    assert not len(replay.scheduler._sharing)


def test_pages_being_loaded_back_are_waited_for_and_loaded_once() -> None:
    replay = Replay(Machine(16, 2048, host_tokens=8192, prefill_tokens=512), Setting("fcfs"))
    replay.run([job((0, 1000)), job((1, 2040), at=1.0)])
    before = replay.tokens_computed
    requests = [replay.add(2 + i, job((0, 1000), (2 + i, 20))) for i in range(4)]
    replay.step()
    assert [request.phase for request in requests[1:]] == [Phase.WAITING] * 3
    finish(replay)
    loaded = replay.cache.stats()["hicache_transfer_pages_total"]
    assert isinstance(loaded, dict)
    assert loaded["load_back"] == 1000 // 16
    assert replay.tokens_computed - before == 4 * (1000 % 16 + 20 + 3)


PARTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 24)), min_size=1, max_size=3)
JOBS = st.lists(st.tuples(PARTS, st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(POLICIES), JOBS, st.sampled_from([0, 90]), st.lists(st.integers(0, 13), max_size=5), st.integers(1, 6))
def test_whatever_happens_to_pioneers_everybody_ends_and_nothing_is_held(
    policy: str, made: list[tuple[list[tuple[int, int]], int, int]], host: int, aborts: list[int], chunk: int
) -> None:
    """Tight memory, so that requests are retracted; aborts at any time."""
    machine = Machine(2, 2 * 46, host_tokens=2 * host, max_running=4, prefill_tokens=4 * chunk, shared_tokens=1)
    replay = Replay(machine, Setting(policy, max_wait_s=0.2))
    requests: dict[int, Request] = {}
    todo = sorted(enumerate(made), key=lambda item: -item[1][2])
    for now in range(10_000):
        while todo and todo[-1][1][2] <= now:
            serial, (parts, output, _) = todo.pop()
            requests[serial] = replay.add(serial, job(*parts, output=output))
        if aborts and now % 7 == 6 and (victim := requests.get(aborts.pop())) and victim.phase is not Phase.FINISHED:
            replay.scheduler.remove(victim)
        stepped = replay.step()
        assert stepped or todo or aborts or replay.cache.in_flight or replay.scheduler.idle, "requests are stuck"
        if not todo and replay.scheduler.idle:
            break
    else:
        raise AssertionError("requests don't end")
    assert all(request.phase is Phase.FINISHED for request in requests.values())
    assert held(replay) == (0, 0)
    assert not len(replay.scheduler._sharing)
    assert not replay.scheduler._sharing.pioneers
    assert replay.scheduler._policy.first([]) is None
