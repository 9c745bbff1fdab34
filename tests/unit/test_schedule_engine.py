"""Sharing under a real model: the same answers, and a pioneer whose step fails takes nobody with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.engine_driver import Driver
from tests.models import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PREFIX = np.random.default_rng(7).integers(3, 259, 64).tolist()
ASKED = [[*PREFIX, 10 + i, 20 + i, 30 + i] for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    driver = Driver(model, disable_radix_cache=True)
    answers = [driver.answer(prompt, 6) for prompt in ASKED]
    driver.close()
    return answers


@pytest.fixture(params=["fcfs", "lpm", "dfs-weight", "cache-aware"])
def driver(model: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = Driver(model, schedule_policy=request.param, chunked_prefill_size=32)
    yield driver
    driver.close()


def test_a_burst_is_answered_as_without_a_cache_and_its_prefix_is_reused(driver: Driver, expected: list[list[int]]) -> None:
    ids = [driver.add(prompt, 6) for prompt in ASKED]
    driver.run()
    assert [driver.tokens[rid] for rid in ids] == expected
    assert sum(driver.last[rid].cached.total for rid in ids) == 5 * 64


def test_when_the_step_of_a_pioneer_fails_its_followers_are_answered(driver: Driver, expected: list[list[int]]) -> None:
    ids = [driver.add(prompt, 6) for prompt in ASKED]
    driver.step()
    forward = driver.core._runner.forward

    def broken(batch: Any) -> Any:
        driver.core._runner.forward = forward  # type: ignore[method-assign]
        raise RuntimeError("out of luck")

    driver.core._runner.forward = broken  # type: ignore[method-assign]
    driver.run()
    assert len(driver.failed) == 1
    assert [driver.tokens[rid] for rid in ids if rid not in driver.failed] == [
        answer for rid, answer in zip(ids, expected, strict=True) if rid not in driver.failed
    ]
    assert sum(driver.last[rid].cached.total for rid in ids if rid not in driver.failed) >= 4 * 64
