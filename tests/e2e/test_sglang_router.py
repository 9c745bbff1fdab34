"""sglang-router before two servers: families of requests stay with a worker, and a worker's death loses none of them."""

from __future__ import annotations

import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import httpx
import pytest

from tests.e2e.conftest import free_port, servers, tiny_flags
from tests.e2e.environments import environment_with

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.conftest import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FAMILIES = 4
ROUNDS = 6


class Fleet(NamedTuple):
    """Two workers, and the router's address."""

    workers: list[ServerProcess]
    url: str


@pytest.fixture
def fleet(tmp_path: Path, tiny_model: Path, model_cache: Path) -> Iterator[Fleet]:
    python = environment_with("sglang-router-0.3.2", "sglang-router==0.3.2")
    with servers(tmp_path, model_cache) as start:
        workers = [start(*tiny_flags(tiny_model, tmp_path / f"store-{i}")) for i in range(2)]
        port, log = free_port(), tmp_path / "router.log"
        command = [
            str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
            "--worker-urls", *(worker.url for worker in workers), "--policy", "cache_aware",
            "--prometheus-port", str(free_port()), "--health-check-interval-secs", "2", "--retry-max-retries", "8",
        ]  # fmt: skip
        with log.open("wb") as out:
            router = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", log)
            yield Fleet(workers, f"http://127.0.0.1:{port}")
        finally:
            router.kill()
            router.wait()


def wait_until_healthy(url: str, log: Path) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"the router does not answer:\n{log.read_text(errors='replace')}")


def story(family: int) -> str:
    return f"{'ABCD'[family] * 40} is the beginning of family {family}. " * 6


def ask(url: str, text: str, tokens: int = 4) -> httpx.Response:
    params = {"max_new_tokens": tokens, "ignore_eos": True}
    return httpx.post(f"{url}/generate", json={"text": text, "sampling_params": params}, timeout=120)


def lookups(worker: ServerProcess) -> tuple[int, int]:
    """Prompt tokens looked up and missed."""
    stats = httpx.get(f"{worker.url}/cache/stats").json()
    return int(stats["hicache_lookup_tokens_total"]), int(stats["hicache_miss_tokens_total"])


def test_families_stay_with_the_worker_that_has_their_prefix(fleet: Fleet) -> None:
    for turn in range(ROUNDS):
        for family in range(FAMILIES):
            response = ask(fleet.url, f"{story(family)} Question {turn}?")
            assert response.status_code == 200, response.text
    looked_up, missed = (sum(column) for column in zip(*map(lookups, fleet.workers), strict=True))
    first_turns = sum(len(story(family)) + 20 for family in range(FAMILIES))
    assert looked_up > (ROUNDS - 1) * first_turns
    assert missed < 1.5 * first_turns  # each family's prefix was computed by one worker, once


def test_a_worker_killed_under_load_loses_no_request(fleet: Fleet) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, fleet.url, f"{story(i % FAMILIES)} Question {i}?", 40) for i in range(72)]
        time.sleep(1.0)
        assert not all(answer.done() for answer in answers), "the load was over too soon"
        victim = max(fleet.workers, key=lambda worker: lookups(worker)[0])
        victim.process.send_signal(signal.SIGKILL)
        statuses = [answer.result().status_code for answer in answers]
    assert statuses == [200] * 72
