"""Clients for benchmarks: multi-turn conversations in token ids against a running server, by its streaming /generate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    TurnOf = Callable[[int, int], Coroutine[Any, Any, None]]

__all__ = ["Load", "Turn", "run_in_turns", "run_load"]


class Load(NamedTuple):
    """What the clients do. Lengths in tokens; rates in requests a second.

    first_tokens: prompt of the first round; later rounds add `request_tokens` to the history. parallel: requests in flight at
    most. rate: Poisson arrivals, or 0 for as fast as `parallel` allows. barrier: a round starts when the last one is over.
    ready_queue: which ready client goes next.
    """

    clients: int = 8
    rounds: int = 4
    first_tokens: int = 1024
    request_tokens: int = 128
    output_tokens: int = 32
    parallel: int = 4
    rate: float = 0.0
    barrier: bool = True
    ready_queue: Literal["fifo", "random"] = "fifo"
    seed: int = 0


class Turn(NamedTuple):
    """One request's outcome. Times in seconds; `cached` by tier (device, host, disk) in tokens."""

    client: int
    round: int
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    latency_s: float
    cached: tuple[int, int, int]
    output_ids: list[int]


async def run_load(url: str, load: Load, vocab_size: int, done: Callable[[Turn], None]) -> float:
    """Run all conversations; returns the seconds it took. Raises httpx.HTTPError if a request fails."""
    async with _client(url) as http:
        turn = _turns(http, load, vocab_size, done)
        rng = random.Random(load.seed)
        start = time.perf_counter()
        if load.barrier:
            for number in range(load.rounds):
                await _round(load, rng, turn, number)
        else:
            await asyncio.gather(*(_alone(load, rng, client, turn) for client in range(load.clients)))
        return time.perf_counter() - start


async def run_in_turns(urls: Sequence[str], load: Load, vocab_size: int, done: Callable[[int, Turn], None]) -> list[float]:
    """Run the same conversations on several servers, each round on all of them before the next one begins.

    So what else the machine does hits all alike. `done` is also told the server's index. Returns the seconds spent on each.
    """
    seconds = [0.0] * len(urls)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(url)) for url in urls]
        turns = [_turns(http, load, vocab_size, partial(done, i)) for i, http in enumerate(clients)]
        rngs = [random.Random(load.seed) for _ in urls]
        for number in range(load.rounds):
            for i, turn in enumerate(turns):
                start = time.perf_counter()
                await _round(load, rngs[i], turn, number)
                seconds[i] += time.perf_counter() - start
    return seconds


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(600), limits=httpx.Limits(max_connections=None))


def _turns(http: httpx.AsyncClient, load: Load, vocab_size: int, done: Callable[[Turn], None]) -> TurnOf:
    """What makes one client's next request to a server; it remembers the conversations."""
    rng = random.Random(load.seed)
    fresh = {
        (client, turn): [
            rng.randrange(vocab_size // 50, vocab_size) for _ in range(load.request_tokens if turn else load.first_tokens)
        ]
        for client in range(load.clients)
        for turn in range(load.rounds)
    }
    histories: list[list[int]] = [[] for _ in range(load.clients)]
    slots = asyncio.Semaphore(load.parallel)

    async def turn(client: int, number: int) -> None:
        async with slots:
            prompt = histories[client] + fresh[client, number]
            result = await _ask(http, client, number, prompt, load.output_tokens)
            histories[client] = prompt + result.output_ids
            done(result)

    return turn


async def _round(load: Load, rng: random.Random, turn: TurnOf, number: int) -> None:
    ready = list(range(load.clients))
    if load.ready_queue == "random":
        rng.shuffle(ready)
    tasks = []
    for client in ready:
        tasks.append(asyncio.ensure_future(turn(client, number)))
        if load.rate:
            await asyncio.sleep(rng.expovariate(load.rate))
    await asyncio.gather(*tasks)


async def _alone(load: Load, rng: random.Random, client: int, turn: TurnOf) -> None:
    for number in range(load.rounds):
        if load.rate:
            await asyncio.sleep(rng.expovariate(load.rate / load.clients))
        await turn(client, number)


async def _ask(http: httpx.AsyncClient, client: int, number: int, prompt: list[int], output_tokens: int) -> Turn:
    sampling = {"max_new_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True, "return_cached_tokens_details": True}
    start, first, last = time.perf_counter(), 0.0, ""
    async with http.stream("POST", "/generate", json=body) as response:
        if response.is_error:
            await response.aread()
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                first = first or time.perf_counter()
                last = line
    answer = json.loads(last.removeprefix("data: "))
    if "meta_info" not in answer:
        raise httpx.HTTPError(str(answer))
    meta = answer["meta_info"]
    split = meta["cached_tokens_details"]
    return Turn(
        client=client,
        round=number,
        prompt_tokens=meta["prompt_tokens"],
        output_tokens=meta["completion_tokens"],
        ttft_s=first - start,
        latency_s=time.perf_counter() - start,
        cached=(split["device"], split["host"], split["storage"]),
        output_ids=answer["output_ids"],
    )
