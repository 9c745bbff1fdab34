"""Messages cross the pipes unchanged; requests end when their consumer or the engine goes away."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest

from engine.client import EngineClient, EngineDead, EngineFailed, EngineRefused
from engine.config import ServeConfig
from engine.messages import (
    AbortRequest,
    CachedTokens,
    ControlReply,
    ControlRequest,
    EngineDown,
    EngineReady,
    GenerateRequest,
    RequestFailed,
    SamplingParams,
    Shutdown,
    TokenLogprobs,
    TokensOut,
    decode_to_engine,
    decode_to_server,
    encode,
)
from tests.scripted_engine import run_crashing, run_half_connected, run_refusing, run_scripted

CONFIG = ServeConfig(model_path="scripted")


def request(rid: str = "r", *, ids: list[int] | None = None, key: str = "") -> GenerateRequest:
    return GenerateRequest(rid, ids or [5, 6, 7], SamplingParams(), extra_key=key)


@pytest.fixture
async def client():
    client = EngineClient(CONFIG, run_scripted)
    await client.start()
    yield client
    await client.shutdown(0.0)


async def collect(client: EngineClient, asked: GenerateRequest) -> list[TokensOut]:
    return [out async for out in client.generate(asked)]


@pytest.mark.parametrize(
    "message",
    [
        GenerateRequest("r", [1, 2], SamplingParams(seed=3, logit_bias={7: -1.5}, stop_token_ids=(2,)), top_logprobs=0),
        AbortRequest("r"),
        ControlRequest("c", "flush", {"deep": [1]}),
        Shutdown(1.5),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_to_the_engine_come_out_as_they_went_in(message):
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        TokensOut("r", [1], 9, CachedTokens(1, 2, 3), [TokenLogprobs(-0.5, [(1, -0.5)])], "stop"),
        RequestFailed("r", "no", 503),
        ControlReply("c", value={"a": 1}),
        EngineReady({"model": "m"}),
        EngineDown("why", refused=True),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_to_the_server_come_out_as_they_went_in(message):
    assert decode_to_server(encode(message)) == message


def test_a_message_for_the_other_side_is_refused():
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(encode(RequestFailed("r", "no")))


async def test_tokens_arrive_in_order_and_once(client):
    outs = await collect(client, request(ids=list(range(50))))
    assert [i for out in outs for i in out.token_ids] == list(range(50))
    assert [out.finish_reason for out in outs] == [None] * 49 + ["stop"]
    assert client.in_flight == 0


async def test_requests_at_once_do_not_mix(client):
    answers = await asyncio.gather(*(collect(client, request(f"r{n}", ids=[n] * 20)) for n in range(1, 20)))
    assert [{i for out in outs for i in out.token_ids} for outs in answers] == [{n} for n in range(1, 20)]


async def test_a_started_engine_takes_requests_at_once():
    client = EngineClient(CONFIG, run_half_connected)
    await client.start()
    try:
        assert len(await collect(client, request(ids=[1, 2, 3]))) == 3
    finally:
        await client.shutdown(0.0)


async def test_a_consumer_that_leaves_aborts_its_request(client):
    async with aclosing(client.generate(request(key="slow", ids=list(range(1000))))) as outs:
        await anext(outs)
    stats = await client.control("stats")
    assert (stats["aborted"], stats["running"], client.in_flight) == (["r"], 0, 0)


async def test_a_cancelled_consumer_aborts_its_request(client):
    task = asyncio.create_task(collect(client, request(key="mute")))
    while not (await client.control("stats"))["running"]:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await client.control("stats"))["aborted"] == ["r"]


async def test_a_finished_request_is_not_aborted(client):
    await collect(client, request())
    assert (await client.control("stats"))["aborted"] == []


async def test_an_abort_by_id_ends_the_stream_with_its_reason(client):
    outs = client.generate(request(key="slow", ids=list(range(1000))))
    first = await anext(outs)
    assert client.abort("r")
    rest = [out async for out in outs]
    assert rest[-1].finish_reason == "abort"
    assert rest[-1].prompt_tokens == first.prompt_tokens == 1000
    assert not client.abort("r")


async def test_a_failed_request_fails_alone(client):
    with pytest.raises(EngineFailed, match="scripted failure") as caught:
        await collect(client, request("bad", key="fail:400"))
    assert caught.value.status == 400
    assert await collect(client, request("good"))


async def test_an_unknown_control_fails(client):
    with pytest.raises(EngineFailed, match="unknown op"):
        await client.control("nonsense")


async def test_the_death_of_the_engine_fails_all_that_wait_and_all_that_follow(client):
    waiting = [asyncio.create_task(collect(client, request(f"w{n}", key="mute"))) for n in range(3)]
    while client.in_flight < 3:
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDead, match="17"):
        await collect(client, request("killer", key="die"))
    for task in waiting:
        with pytest.raises(EngineDead):
            await task
    assert not client.healthy
    with pytest.raises(EngineDead):
        await collect(client, request("late"))
    with pytest.raises(EngineDead):
        await client.control("stats")


async def test_a_refusal_at_start_says_why():
    with pytest.raises(EngineRefused, match="scripted refusal"):
        await EngineClient(CONFIG, run_refusing).start()


async def test_a_crash_at_start_is_noticed():
    with pytest.raises(EngineDead, match="code 9"):
        await EngineClient(CONFIG, run_crashing).start()


async def test_shutdown_twice_is_shutdown_once():
    client = EngineClient(CONFIG, run_scripted)
    await client.start()
    await client.shutdown(0.0)
    await client.shutdown(0.0)
    assert not client.healthy
