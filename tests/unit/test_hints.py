"""Hints for the cache, under a real engine: what they do, and that they never stand in anybody's way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.messages import CacheHint, PinHint, SamplingParams
from tests.engine_driver import Driver
from tests.models import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(**flags: Any) -> Driver:
        tiers = {
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "lmdb",
            "hicache_storage_dir": str(tmp_path / "store"),
            "hicache_storage_size": "100MB",
            "hicache_storage_backend_extra_config": '{"prefetch_threshold": 0}',
            "max_total_tokens": 256,
        }
        started.append(Driver(model, **{**tiers, **flags}))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, length).tolist()


def hint(driver: Driver, op: Any, tokens: list[int], **fields: Any) -> int:
    """Give a hint; returns the count that it answers with."""
    answer = driver.core.hint(CacheHint("h", op, tokens, **fields))
    assert answer.pop("tokens") == len(tokens)
    return next(iter(answer.values()))


def churn(driver: Driver, rounds: int = 8) -> None:
    """Fill the device with other prompts."""
    for seed in range(100, 100 + rounds):
        driver.answer(prompt(60, seed), 4)


def on_device(driver: Driver, tokens: list[int]) -> int:
    """Tokens of a prompt that are on the device, as a request would find them."""
    rid = driver.add(tokens, sampling=SamplingParams(max_new_tokens=1))
    driver.run()
    return driver.last[rid].cached.device


def pages(driver: Driver) -> dict[str, float]:
    return driver.stats()["hicache_pages"]


def test_a_pinned_prefix_outlives_what_pushes_out_others(engine: Callable[..., Driver]) -> None:
    driver, kept, other = engine(), prompt(40, 1), prompt(40, 2)
    driver.answer(kept, 1)
    driver.answer(other, 1)
    assert hint(driver, "pin", kept, ttl_s=600.0) == 40
    churn(driver)
    assert on_device(driver, kept) == 36
    assert on_device(driver, other) == 0


def test_a_pin_ends_by_itself(engine: Callable[..., Driver]) -> None:
    driver, kept = engine(), prompt(40, 1)
    driver.answer(kept, 1)
    hint(driver, "pin", kept, ttl_s=0.001)
    churn(driver)
    assert pages(driver)["device/pinned"] == 0
    assert driver.stats()["hicache_hinted_pages"] == 0
    assert on_device(driver, kept) == 0


def test_pins_are_bounded_and_the_same_prefix_is_pinned_once(engine: Callable[..., Driver]) -> None:
    driver = engine()
    asked = [prompt(40, seed) for seed in range(4)]
    for each in asked:
        driver.answer(each, 1)
    pinned = [hint(driver, "pin", each, ttl_s=600.0) for each in asked]
    assert sum(pinned) == 64  # a quarter of 256
    assert pinned[0] == 40
    assert hint(driver, "pin", asked[0], ttl_s=900.0) == 40
    assert driver.stats()["hicache_hinted_pages"] == 16


def test_pins_are_given_up_for_a_request_that_needs_the_room(engine: Callable[..., Driver]) -> None:
    driver, kept = engine(), prompt(60, 1)
    driver.answer(kept, 1)
    assert hint(driver, "pin", kept, ttl_s=600.0) == 60
    alone = engine(hicache_storage_backend="none", hicache_storage_dir=None, hicache_storage_backend_extra_config="")
    long = prompt(240, 7)
    assert driver.answer(long, 8) == alone.answer(long, 8)
    assert driver.stats()["hicache_hinted_pages"] == 0


def test_running_requests_retract_nobody_before_pins_are_given_up(engine: Callable[..., Driver]) -> None:
    driver, kept = (
        engine(enable_hierarchical_cache=False, hicache_storage_backend="none", hicache_storage_dir=None),
        prompt(60, 1),
    )
    driver.answer(kept, 1)
    hint(driver, "pin", kept, ttl_s=600.0)
    driver.answer(prompt(100, 2), 140)
    assert driver.stats()["hicache_retracted_requests_total"] == 0


def test_a_demoted_prefix_leaves_the_device_and_comes_back_from_the_host(engine: Callable[..., Driver]) -> None:
    driver, tokens = engine(), prompt(40, 1)
    answer = driver.answer(tokens, 8)
    driver.settle()
    assert hint(driver, "demote", tokens) == 44  # the answer's pages go with it: 47 tokens are 11 pages
    assert pages(driver)["device/cached"] == 0
    rid = driver.add(tokens, 8)
    driver.run()
    assert driver.last[rid].cached.host == 36
    assert driver.tokens[rid] == answer


def test_what_others_need_or_use_is_not_demoted(engine: Callable[..., Driver]) -> None:
    driver = engine()
    system, first, second = prompt(16, 1), prompt(20, 2), prompt(20, 3)
    driver.answer(system + first, 1)
    driver.answer(system + second, 1)
    driver.settle()
    assert hint(driver, "demote", system + first) == 20
    assert on_device(driver, system + second) == 32
    hint(driver, "pin", system + second, ttl_s=600.0)
    assert hint(driver, "demote", system) == 0


def test_without_a_lower_copy_nothing_is_demoted(engine: Callable[..., Driver]) -> None:
    driver = engine(enable_hierarchical_cache=False, hicache_storage_backend="none", hicache_storage_dir=None)
    tokens = prompt(40, 1)
    driver.answer(tokens, 1)
    assert hint(driver, "demote", tokens) == 0
    assert on_device(driver, tokens) == 36


def test_a_prefetched_prefix_is_in_memory_after_a_restart(engine: Callable[..., Driver]) -> None:
    first, tokens = engine(), prompt(40, 1)
    first.answer(tokens, 1)
    first.close()
    second = engine()
    assert hint(second, "prefetch", tokens) == 0
    second.settle()
    assert hint(second, "prefetch", tokens) == 40
    second.settle()
    assert pages(second)["host/cached"] == 10
    rid = second.add(tokens, 1)
    second.run()
    assert second.last[rid].cached.host == 36  # the hint brought it up before the request came


def test_prefetch_hints_leave_nothing_behind(engine: Callable[..., Driver]) -> None:
    driver = engine()
    for seed in range(100):
        hint(driver, "prefetch", prompt(40, seed))
    driver.settle()
    driver.core.cache.poll()
    assert driver.core.cache.hints.prefetches == 0
    assert pages(driver)["host/cached"] == 0


@pytest.mark.parametrize("op", ["prefetch", "pin", "demote"])
def test_a_hint_about_what_is_not_there_does_nothing(engine: Callable[..., Driver], op: Any) -> None:
    driver = engine()
    assert hint(driver, op, prompt(40), cache_salt="nobody", ttl_s=5.0) == 0
    assert hint(driver, op, [5], ttl_s=5.0) == 0
    driver.settle()
    assert hint(driver, op, prompt(40), ttl_s=5.0) == 0


def test_salts_are_kept_apart(engine: Callable[..., Driver]) -> None:
    driver, tokens = engine(), prompt(40)
    driver.answer(tokens, 1, cache_salt="a")
    assert hint(driver, "pin", tokens, ttl_s=5.0, cache_salt="b") == 0
    assert hint(driver, "pin", tokens, ttl_s=5.0, cache_salt="a") == 40


def test_a_request_pins_what_it_was_asked_to_once_that_is_computed(engine: Callable[..., Driver]) -> None:
    driver, tokens = engine(chunked_prefill_size=16), prompt(60)
    driver.answer(tokens, 4, pin=PinHint(tokens=34, ttl_s=600.0))
    assert driver.stats()["hicache_hinted_pages"] == 8
    churn(driver)
    assert on_device(driver, tokens) == 32


def test_a_flush_gives_up_pins(engine: Callable[..., Driver]) -> None:
    driver, tokens = engine(), prompt(40)
    driver.answer(tokens, 1)
    hint(driver, "pin", tokens, ttl_s=600.0)
    driver.settle()
    driver.core.cache.flush()
    assert pages(driver)["device/free"] == 64
