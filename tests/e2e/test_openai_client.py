"""The openai package against the real server: synchronous, asynchronous, streaming, many at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import ServerProcess

HI: Any = [{"role": "user", "content": "Hello there, tell me about the tide"}]
FIXED: Any = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def test_chats_and_completions_answer_alike_whole_and_streamed(tiny: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=HI, **FIXED)
        stream = client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}, **FIXED
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        plain = client.completions.create(model="tiny", prompt="The tide", logprobs=2, echo=True, **FIXED)
        logprobs = plain.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.token_logprobs is not None
        assert "".join(logprobs.tokens[:8]) == "The tide"
        assert logprobs.token_logprobs[0] is None
        assert all(p is not None and p <= 0 for p in logprobs.token_logprobs[1:])


async def test_many_asynchronous_streams_at_once_give_each_its_own_answer(tiny: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:

        async def streamed(number: int) -> str:
            prompt = f"Story number {number}: "
            stream = await client.completions.create(model="tiny", prompt=prompt, stream=True, **FIXED)
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def whole(number: int) -> str:
            prompt = f"Story number {number}: "
            return (await client.completions.create(model="tiny", prompt=prompt, **FIXED)).choices[0].text

        streams = await asyncio.gather(*(streamed(number) for number in range(24)))
        assert streams == [await whole(number) for number in range(24)]


async def test_an_asynchronous_client_that_stops_reading_leaves_nothing_running(tiny: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="tiny", prompt="For ever: ", stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        for _ in range(200):
            info: Any = await client.get("/../get_server_info", cast_to=object)
            if info["in_flight"] == 0:
                return
            await asyncio.sleep(0.05)
        pytest.fail("the request still runs")
