"""The disk tier under real servers: faults, two processes on one folder, attach and detach. The model is tiny."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.models import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import ServerProcess

ADMIN = {"Authorization": "Bearer tender"}
FAULTS = [
    {"kind": "flip", "at": 5, "every": 5},
    {"kind": "short", "at": 7, "every": 7},
    {"kind": "fail", "at": 3, "every": 4, "method": "get_many"},
    {"kind": "raise", "at": 5, "every": 4, "method": "get_many"},
    {"kind": "fail", "at": 2, "every": 3, "method": "put_many"},
    {"kind": "raise", "at": 4, "every": 7, "method": "count_prefix"},
    {"kind": "slow", "at": 9, "every": 40, "seconds": 0.05},
    {"kind": "hang", "at": 50, "every": 300, "method": "get_many", "seconds": 0.5},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


def tiers(model: Path, folder: Path, **extra: Any) -> list[str]:
    """Flags of a server whose device and host are far too small, so that most hits come from disk.

    A tiny model computes so quickly that reading hardly ever pays; `wait_complete` reads all the same.
    """
    return [
        "--model-path", str(model), "--page-size", "4", "--max-total-tokens", "640", "--enable-hierarchical-cache",
        "--hicache-ratio", "1.0", "--hicache-storage-backend", "lmdb", "--hicache-storage-dir", str(folder),
        "--hicache-storage-size", "64MB", "--hicache-storage-prefetch-policy", "wait_complete",
        "--enable-cache-report", "--admin-api-key", "tender", "--log-level", "error",
        "--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": 1, "prefetch_timeout_base": 0.2, **extra}),
    ]  # fmt: skip


async def ask(http: httpx.AsyncClient, prompt: list[int]) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


class Talks:
    """Conversations that share beginnings; what each must be answered is known from a server without a cache."""

    def __init__(self, count: int, turns: int) -> None:
        rng = random.Random(11)
        self.count, self.turns = count, turns
        systems = [[rng.randrange(3, 259) for _ in range(40)] for _ in range(3)]
        self.starts = [systems[i % 3] + [rng.randrange(3, 259) for _ in range(20)] for i in range(count)]
        self.asked = [[[rng.randrange(3, 259) for _ in range(12)] for _ in range(turns)] for _ in range(count)]

    async def run(self, urls: list[str], rounds: int = 1, parallel: int = 8) -> list[list[list[int]]]:
        """All answers by round and conversation; conversations go to the servers in turn and run side by side."""
        gate = asyncio.Semaphore(parallel)
        clients = [httpx.AsyncClient(base_url=url, timeout=60) for url in urls]

        async def talk(number: int, round_: int) -> list[int]:
            async with gate:
                history, said = list(self.starts[number]), []
                for turn in range(self.turns):
                    history += self.asked[number][turn]
                    answer = await ask(clients[(number + round_ + turn) % len(clients)], history)
                    history += answer
                    said += answer
                return said

        out = [await asyncio.gather(*(talk(number, round_) for number in range(self.count))) for round_ in range(rounds)]
        for client in clients:
            await client.aclose()
        return out


def expected(server: Callable[..., ServerProcess], model: Path, talks: Talks) -> list[list[int]]:
    plain = server("--model-path", str(model), "--disable-radix-cache", "--max-total-tokens", "8192", "--log-level", "error")
    answers = asyncio.run(talks.run([plain.url]))[0]
    assert plain.stop() == 0
    return answers


def at_rest(url: str) -> dict[str, Any]:
    """The counters once nothing is in flight."""
    for _ in range(200):
        stats = httpx.get(f"{url}/cache/stats", timeout=30).json()
        if stats["hicache_operations_in_flight"] == 0:
            return stats
    raise AssertionError("operations are stuck")


def check_conserved(stats: dict[str, Any]) -> None:
    pages, capacity = stats["hicache_pages"], stats["hicache_capacity_pages"]
    assert pages["device/pinned"] == pages["device/private"] == 0
    assert pages["device/free"] + pages["device/cached"] == capacity["device"]
    assert sum(count for state, count in pages.items() if state.startswith("host/")) == capacity["host"]


def game_day(server: Callable[..., ServerProcess], model: Path, folder: Path, faults: int) -> None:
    talks = Talks(count=16, turns=3)
    right = expected(server, model, talks)
    running = server(*tiers(model, folder, faults={"seed": 3, "faults": FAULTS}))
    injected = 0
    while injected < faults:
        for answers in asyncio.run(talks.run([running.url], rounds=3)):
            assert answers == right
        info = httpx.get(f"{running.url}/hicache/storage-backend", headers=ADMIN, timeout=30)
        if info.status_code == 200:
            injected = sum(info.json()["injected_faults"].values())
    stats = at_rest(running.url)
    check_conserved(stats)
    assert stats["hicache_hit_tokens_total"]["disk"] > 0
    assert stats["hicache_store_errors_total"]["get_corrupt"] > 0
    assert running.stop() == 0


@pytest.mark.timeout(300)
def test_faults_of_the_store_never_show_in_an_answer(server: Callable[..., ServerProcess], model: Path, tmp_path: Path) -> None:
    game_day(server, model, tmp_path / "store", faults=100)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_faults_never_show_in_an_answer(server: Callable[..., ServerProcess], model: Path, tmp_path: Path) -> None:
    game_day(server, model, tmp_path / "store", faults=10_000)


@pytest.mark.timeout(300)
def test_two_servers_on_one_folder_hit_each_others_pages_under_one_cap(
    server: Callable[..., ServerProcess], model: Path, tmp_path: Path
) -> None:
    talks = Talks(count=16, turns=3)
    right = expected(server, model, talks)
    folder = tmp_path / "store"
    pair = [server(*tiers(model, folder)) for _ in range(2)]
    for answers in asyncio.run(talks.run([each.url for each in pair], rounds=2)):
        assert answers == right
    fresh = server(*tiers(model, folder))
    assert asyncio.run(talks.run([fresh.url], parallel=1))[0] == right
    assert at_rest(fresh.url)["hicache_hit_tokens_total"]["disk"] > 0  # it computed none of that itself
    for each in (*pair, fresh):
        check_conserved(at_rest(each.url))
        assert httpx.get(f"{each.url}/hicache/storage-backend", headers=ADMIN).json()["bytes"] <= 64 << 20
        assert each.stop() == 0


@pytest.mark.timeout(300)
def test_a_store_is_detached_and_attached_while_requests_run(
    server: Callable[..., ServerProcess], model: Path, tmp_path: Path
) -> None:
    talks = Talks(count=12, turns=3)
    right = expected(server, model, talks)
    running = server(*tiers(model, tmp_path / "one"))
    backend = f"{running.url}/hicache/storage-backend"

    async def tend() -> list[int]:
        async with httpx.AsyncClient(headers=ADMIN, timeout=60) as http:
            seen = []
            for folder in ("two", "one", "two"):
                await asyncio.sleep(0.3)
                seen.append((await http.delete(backend)).status_code)
                await asyncio.sleep(0.2)
                flags = {"hicache_storage_backend": "lmdb", "hicache_storage_dir": str(tmp_path / folder)}
                seen.append((await http.put(backend, json=flags)).status_code)
            return seen

    async def both() -> tuple[list[int], list[list[list[int]]]]:
        seen, answers = await asyncio.gather(tend(), talks.run([running.url], rounds=4))
        return seen, answers

    seen, rounds = asyncio.run(both())
    assert all(answers == right for answers in rounds)
    assert seen == [200] * 6
    stats = at_rest(running.url)
    check_conserved(stats)
    assert httpx.get(backend).status_code == 401
    info = httpx.get(backend, headers=ADMIN).json()
    assert info["pages"] > 0
    assert httpx.post(f"{running.url}/clear_hicache_storage_backend", headers=ADMIN).json()["cleared_pages"] > 0
    assert httpx.get(backend, headers=ADMIN).json()["pages"] == 0
    assert httpx.delete(backend, headers=ADMIN).status_code == 200
    assert httpx.delete(backend, headers=ADMIN).status_code == 400
    assert asyncio.run(talks.run([running.url]))[0] == right
    assert running.stop() == 0


def test_a_server_whose_store_folder_is_deleted_serves_detaches_and_ends(
    server: Callable[..., ServerProcess], model: Path, tmp_path: Path
) -> None:
    talks = Talks(count=4, turns=2)
    running = server(*tiers(model, tmp_path / "store"))
    backend = f"{running.url}/hicache/storage-backend"
    right = asyncio.run(talks.run([running.url]))
    shutil.rmtree(tmp_path / "store")
    assert asyncio.run(talks.run([running.url])) == right
    assert httpx.delete(backend, headers=ADMIN, timeout=30).json() == {"detached": True, "clean": False}
    assert httpx.put(backend, headers=ADMIN, json={}, timeout=30).json() == {"attached": True}
    shutil.rmtree(tmp_path / "store")
    assert running.stop() == 0
    assert "Traceback" not in running.output
