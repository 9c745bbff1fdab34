"""What the engine does with requests: admission, retraction, refusal, failure, abort. A tiny real model runs under it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.messages import SamplingParams
from hicache.errors import ConfigError
from hicache.transfer.operation import OpKind
from tests.engine_driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.batch import Batch


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, length).tolist()


def held(driver: Driver) -> dict[str, float]:
    """Device pages that are not free and not merely cached."""
    pages = driver.stats()["hicache_pages"]
    return {state: pages[f"device/{state}"] for state in ("pinned", "private")}


NOTHING = {"pinned": 0, "private": 0}


def test_decode_without_room_retracts_the_youngest_and_all_finish_with_the_same_tokens(engine: Callable[..., Driver]) -> None:
    alone = engine(max_total_tokens=1024)
    asked = [prompt(20, seed) for seed in range(6)]
    expected = [alone.answer(each, 80) for each in asked]
    tight = engine(max_total_tokens=256)
    ids = [tight.add(each, 80) for each in asked]
    tight.run()
    assert [tight.tokens[rid] for rid in ids] == expected
    assert tight.stats()["hicache_retracted_requests_total"] > 0
    assert held(tight) == NOTHING


def test_a_retracted_request_is_counted_once(engine: Callable[..., Driver]) -> None:
    tight = engine(max_total_tokens=256)
    for seed in range(6):
        tight.add(prompt(20, seed), 80)
    tight.run()
    stats = tight.stats()
    assert stats["hicache_retracted_requests_total"] > 0
    assert stats["hicache_lookup_tokens_total"] == 6 * 20


def test_an_answer_ends_at_the_pool_size_with_reason_length(engine: Callable[..., Driver]) -> None:
    driver = engine(max_total_tokens=128)
    rid = driver.add(prompt(100), 500)
    driver.run()
    assert len(driver.tokens[rid]) == 28
    assert driver.last[rid].finish_reason == "length"


@pytest.mark.parametrize(
    ("ids", "fields", "reason"),
    [
        (prompt(128), {}, "the prompt has 128 tokens; with the answer, 128 fit into the device pool"),
        (prompt(600), {}, "the prompt has 600 tokens; with the answer, 512 fit into the context"),
        ([], {}, "the prompt is empty"),
        ([5, 259], {}, "token ids must be in [0, 259)"),
        ([5], {"lora": "x"}, "this server has no LoRA adapters"),
        ([5], {"sampling": SamplingParams(max_new_tokens=-1)}, "no fewer than 0 tokens can be asked for"),
    ],
)
def test_what_can_not_be_served_is_refused_with_the_reason(
    engine: Callable[..., Driver], ids: list[int], fields: dict[str, Any], reason: str
) -> None:
    driver = engine(max_total_tokens=128)
    rid = driver.add(ids, **fields)
    assert (driver.failed[rid].message, driver.failed[rid].status) == (reason, 400)
    assert driver.core.idle


def test_full_pages_are_shared_while_the_first_request_still_runs(engine: Callable[..., Driver]) -> None:
    driver = engine()
    shared = prompt(64)
    first = driver.add(shared, 40)
    for _ in range(4):
        driver.step()
    second = driver.add([*shared, 7, 8], 4)
    while second not in driver.last:
        driver.step()
    assert driver.last[first].finish_reason is None
    assert driver.last[second].cached.device == 64


def test_a_request_that_waits_for_its_load_holds_up_nobody(engine: Callable[..., Driver]) -> None:
    driver = engine(max_total_tokens=256, enable_hierarchical_cache=True, hicache_ratio=4.0)
    old = prompt(120, 1)
    expected = driver.answer([*old, 5])
    driver.answer(prompt(240, 2))
    driver.settle()
    copier = driver.core.cache._t.copier
    submit, withheld = copier.submit, []
    copier.submit = lambda op: withheld.append(op) if op.kind is OpKind.LOAD_BACK else submit(op)
    slow = driver.add([*old, 5])
    quick = driver.add(prompt(40, 3))
    while quick not in driver.last or driver.last[quick].finish_reason is None:
        driver.step()
    assert slow not in driver.last
    submit(withheld.pop())
    driver.run()
    assert driver.tokens[slow] == expected
    assert driver.last[slow].cached.host > 0


def test_aborted_in_any_phase_a_request_frees_what_it_held(engine: Callable[..., Driver]) -> None:
    flags = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_storage_backend": "memory"}
    for steps in range(8):
        driver = engine(max_total_tokens=256, chunked_prefill_size=16, **flags)
        driver.answer(prompt(100))
        ids = [driver.add(prompt(100), 20), driver.add(prompt(60, 3), 20)]
        for _ in range(steps):
            driver.step()
        for rid in ids:
            driver.core.abort(rid)
        assert driver.core.idle
        driver.settle()
        assert held(driver) == NOTHING


def test_an_exception_in_a_step_fails_its_requests_and_the_engine_goes_on(engine: Callable[..., Driver]) -> None:
    driver = engine()
    expected = driver.answer(prompt(10))
    runner = driver.core._runner
    forward = runner.forward

    def broken(batch: Batch) -> Any:
        runner.forward = forward  # type: ignore[method-assign]
        raise RuntimeError("out of luck")

    runner.forward = broken  # type: ignore[method-assign]
    rid = driver.add(prompt(10, 4))
    driver.run()
    assert driver.failed[rid].status == 500
    assert "RuntimeError" in driver.failed[rid].message
    assert "luck" not in driver.failed[rid].message
    assert held(driver) == NOTHING
    assert driver.answer(prompt(10)) == expected


def test_salt_and_extra_key_separate_what_is_cached(engine: Callable[..., Driver]) -> None:
    driver = engine()
    asked = prompt(41)
    for fields in ({}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "a"}):
        rid = driver.add(asked, **fields)
        driver.run()
        assert driver.last[rid].cached.total == 0
        rid = driver.add(asked, **fields)
        driver.run()
        assert driver.last[rid].cached.device == 40


def test_lpm_runs_the_longest_cached_prefix_first_and_fcfs_the_first(engine: Callable[..., Driver]) -> None:
    for policy, first_done in (("fcfs", 0), ("lpm", 1)):
        driver = engine(schedule_policy=policy, max_running_requests=1)
        known = prompt(41)
        driver.answer(known)
        ids = [driver.add(prompt(41, 9)), driver.add(known)]
        done: list[str] = []
        while not driver.core.idle:
            driver.step()
            done += [rid for rid in ids if rid not in done and rid in driver.last and driver.last[rid].finish_reason]
        assert done[0] == ids[first_done]


def test_a_stop_token_ends_the_answer(engine: Callable[..., Driver]) -> None:
    driver = engine()
    free = driver.answer(prompt(12), 10)
    stop = free[4]
    rid = driver.add(
        prompt(12), sampling=SamplingParams(max_new_tokens=10, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
    )
    driver.run()
    assert driver.tokens[rid] == free[: free.index(stop) + 1]
    assert driver.last[rid].finish_reason == "stop"


def test_a_pool_too_small_for_one_request_is_refused_at_start(model: Path) -> None:
    with pytest.raises(ConfigError, match="the device pool holds 64 tokens, too few for one request"):
        Driver(model, max_total_tokens=64)


def test_a_host_pool_that_memory_can_not_hold_is_refused_at_start(model: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit into"):
        Driver(model, enable_hierarchical_cache=True, hicache_size=1e6)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_8_bit_kv_takes_a_quarter_of_fp32s_room_and_is_reused_as_it_was(engine, kv_dtype):
    half = engine(kv_cache_dtype=kv_dtype)
    prompt = list(range(3, 40))
    first = half.answer(prompt)
    assert half.answer(prompt) == first
    assert half.stats()["hicache_hit_tokens_total"]["device"] == 36
    assert half.core.info()["tiers"]["device"]["bytes"] * 4 == engine().core.info()["tiers"]["device"]["bytes"]


def test_a_front_that_is_computed_and_a_back_that_is_read_give_the_same_tokens(engine: Callable[..., Driver]) -> None:
    tiers = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_storage_backend": "memory"}
    driver = engine(**tiers, hicache_storage_backend_extra_config='{"prefetch_threshold": 0}', chunked_prefill_size=64)
    asked = prompt(400)
    expected = driver.answer(asked)
    driver.settle()
    cache = driver.core.cache
    cache.flush()
    compute_s = cache._t.planner.compute_s(0, 400)
    assert compute_s is not None
    cache._t.planner.observe_read(1, 100, compute_s)  # as slow as computing
    worker = cache._t.worker
    assert worker is not None
    submit, withheld = worker.submit, []
    worker.submit = lambda op: withheld.append(op) if op.kind is OpKind.PREFETCH else submit(op)  # type: ignore[method-assign]
    rid = driver.add(asked)
    while not withheld or driver.stats()["hicache_pages"]["device/pinned"] < 10:
        driver.step()
    worker.submit = submit  # type: ignore[method-assign]
    for op in withheld:
        submit(op)
    driver.run()
    assert driver.tokens[rid] == expected
    met = driver.stats()["hicache_overlap_tokens_total"]
    assert met["computed"] + met["loaded"] == 396
    assert driver.last[rid].cached.disk == met["loaded"] > 0
