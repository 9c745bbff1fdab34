"""Answers held to a grammar, through the real server. Its model is random, so the grammar alone makes them what they are."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import ServerProcess

HI: Any = [{"role": "user", "content": "Hello there"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(tiny: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_every_answer_of_a_chat_follows_its_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, response_format=FORMAT, n=4, max_tokens=300)
    for choice in answer.choices:
        person = json.loads(choice.message.content or "")
        assert (set(person), choice.finish_reason) == ({"name", "age"}, "stop")
        assert 0 <= person["age"] <= 99


def test_streamed_answers_follow_it_too(client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    stream = client.chat.completions.create(model="tiny", messages=HI, response_format=FORMAT, n=3, max_tokens=300, stream=True)
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [set(json.loads(text)) for text in texts] == [{"name", "age"}] * 3


def test_a_json_object_begins_as_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HI, response_format={"type": "json_object"}, max_tokens=8, logprobs=True
    )
    assert (answer.choices[0].message.content or "").startswith("{")
    assert answer.choices[0].logprobs is not None


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("extra", [{"regex": "[0-9]{4}"}, {"ebnf": "root ::= [0-9] [0-9] [0-9] [0-9]"}])
def test_a_pattern_holds_in_all_endpoints(tiny: ServerProcess, path: str, extra: dict[str, str]) -> None:
    prompt = {"messages": HI} if path.startswith("chat") else {"prompt": "Hello"}
    choice = httpx.post(f"{tiny.url}/v1/{path}", json={**prompt, **extra}, timeout=60).json()["choices"][0]
    assert re.fullmatch("[0-9]{4}", choice["message"]["content"] if path.startswith("chat") else choice["text"])
    native = httpx.post(f"{tiny.url}/generate", json={"text": "Hello", "sampling_params": extra}, timeout=60).json()
    assert re.fullmatch("[0-9]{4}", native["text"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "extra",
    [
        {"regex": "[0-9"},
        {"ebnf": "root ::= missing"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
    ],
)
def test_a_bad_grammar_is_400_with_its_reason(tiny: ServerProcess, extra: dict[str, Any], stream: bool) -> None:
    response = httpx.post(f"{tiny.url}/v1/completions", json={"prompt": "a", "stream": stream, **extra}, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
