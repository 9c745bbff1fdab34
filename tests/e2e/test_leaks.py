"""Hours of traffic in minutes: what clients that come and go leave behind, which must be nothing."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import tiny_flags

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CLIENTS, ROUNDS = 200, 2
REQUESTS = 5_000


def processes(running: ServerProcess) -> list[psutil.Process]:
    """The server and the engine."""
    main = psutil.Process(running.process.pid)
    return [main, *main.children(recursive=True)]


def held(running: ServerProcess) -> dict[str, float]:
    """What requests hold: pages, places in the engine, sockets and threads of the processes."""
    stats = httpx.get(f"{running.url}/cache/stats").json()
    pages, requests = stats["hicache_pages"], stats["hicache_requests"]
    info = httpx.get(f"{running.url}/get_server_info").json()
    alive = processes(running)
    return {
        "pinned pages": pages["device/pinned"],
        "private pages": pages["device/private"],
        "requests in the engine": sum(requests.values()),
        "sequences in the server": info["in_flight"],
        "hinted pages": stats["hicache_hinted_pages"],
        "sockets": sum(c.status == "ESTABLISHED" for process in alive for c in process.net_connections("tcp")),
        "processes": len(alive),
    }


def settled(running: ServerProcess, expected: dict[str, float]) -> None:
    """Wait until all that was held is given back; fail with what was not."""
    deadline_s = time.monotonic() + 30
    while (now := held(running)) != expected:
        assert time.monotonic() < deadline_s, (now, expected)
        time.sleep(0.2)


async def stream(client: httpx.AsyncClient, url: str, body: Any, stop_after: int | None) -> int:
    """Read a stream, or go away after some of its events; returns the number of events read."""
    events = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            events += line.startswith("data: ")
            if stop_after is not None and events >= stop_after:
                break
    return events


async def crowd(url: str, rng: random.Random) -> list[int]:
    """All clients at once, a fifth of which go away."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        jobs = []
        for number in range(CLIENTS):
            prompt = f"Family {number % 7}: {'once upon a time ' * 10} {number} " * (1 + number % 3)
            body = {"prompt": prompt, "max_tokens": 24, "stream": True, "ignore_eos": True, "n": 1 + (number % 11 == 0)}
            jobs.append(stream(client, url, body, rng.randrange(20) if rng.random() < 0.2 else None))
        return await asyncio.gather(*jobs)


def test_clients_that_go_away_leave_nothing(server: Callable[..., ServerProcess], tiny_model: Path, tmp_path: Path) -> None:
    running = server(*tiny_flags(tiny_model, tmp_path / "store"), "--log-level", "info")
    rng = random.Random(5)
    before = held(running)
    handles = [process.num_fds() for process in processes(running)]
    for _ in range(ROUNDS):
        counts = asyncio.run(crowd(running.url, rng))
        assert len(counts) == CLIENTS
        settled(running, before)
    assert [process.num_fds() for process in processes(running)] == pytest.approx(handles, abs=8)
    assert "Traceback" not in running.output
    assert running.stop() == 0


async def requests_of_all_kinds(url: str, first: int, count: int) -> None:
    """Send requests, sixteen at a time: whole, streamed, chats, with grammars, hints, scores, and bad ones."""
    gate = asyncio.Semaphore(16)
    async with httpx.AsyncClient(timeout=300) as client:

        async def one(number: int) -> None:
            text = f"{number} is the number of a story. "
            chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
            kinds: list[tuple[str, Any, int]] = [
                ("/v1/completions", {"prompt": text, "max_tokens": 3}, 200),
                ("/v1/completions", {"prompt": text, "max_tokens": 3, "stream": True}, 200),
                ("/v1/completions", {"prompt": text, "max_tokens": 6, "regex": f"[0-9]{{{number % 5 + 1}}}"}, 200),
                ("/v1/chat/completions", chat, 200),
                ("/generate", {"text": text, "return_logprob": True, "logprob_start_len": 0}, 200),
                ("/cache/pin", {"text": text, "ttl_s": 0.01}, 200),
                ("/cache/prefetch", {"text": text}, 200),
                ("/v1/completions", {"prompt": text, "regex": "["}, 400),
            ]
            path, body, status = kinds[number % len(kinds)]
            if path == "/generate":
                body["sampling_params"] = {"max_new_tokens": 1}
            async with gate:
                response = await client.post(url + path, json=body)
            assert response.status_code == status, response.text

        await asyncio.gather(*(one(number) for number in range(first, first + count)))


def test_memory_is_flat_over_thousands_of_requests(
    server: Callable[..., ServerProcess], tiny_model: Path, tmp_path: Path
) -> None:
    running = server(*tiny_flags(tiny_model, tmp_path / "store"), "--log-level", "info", "--max-total-tokens", "4096")
    before = held(running)
    used_mib = []
    for part in range(5):
        asyncio.run(requests_of_all_kinds(running.url, part * REQUESTS // 5, REQUESTS // 5))
        used_mib.append([process.memory_info().rss >> 20 for process in processes(running)])
    settled(running, before)
    print("resident MiB after each fifth:", used_mib)
    growth = [last - second for second, last in zip(used_mib[1], used_mib[-1], strict=True)]
    assert max(growth) < 24, used_mib  # of several hundred: what 3,000 requests leave, once pools and caches have filled
