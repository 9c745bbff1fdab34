"""OpenAI's /v1/responses through the openai package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.e2e.conftest import ServerProcess

SCHEMA: Any = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["age"],
               "additionalProperties": False}  # fmt: skip
FORMAT: Any = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_text_is_answered_with_text(client: openai.OpenAI) -> None:
    response = client.responses.create(model="any", input="Hello there", instructions="Be brief")
    assert "Be brief" in response.output_text
    assert "Hello there" in response.output_text
    assert (response.status, response.object, response.instructions) == ("completed", "response", "Be brief")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens == 7


def test_a_conversation_may_hold_parts_and_earlier_output(client: openai.OpenAI) -> None:
    first = client.responses.create(model="any", input="One", max_output_tokens=4)
    assert first.status == "incomplete"
    assert first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens"
    conversation: Any = [
        {"role": "developer", "content": "Be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "Two"},
    ]
    text = client.responses.create(model="any", input=conversation).output_text
    assert text.index("Be kind") < text.index("One") < text.index("Two")


def test_the_events_of_a_stream_are_openais_and_add_up(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="any", input="Hello there")
    events: list[Any] = list(client.responses.create(model="any", input="Hello there", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]


def test_a_stream_names_its_events_and_has_no_done(http: httpx.Client) -> None:
    raw = http.post("/v1/responses", json={"input": "Hello", "stream": True}).text
    blocks = raw.removesuffix("\n\n").split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert "[DONE]" not in raw


def test_the_package_helps_with_streams_and_schemas(tiny: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(model="tiny", input="Hello", text=FORMAT, max_output_tokens=200) as stream:
            final = stream.get_final_response()
        assert 0 <= json.loads(final.output_text)["age"] <= 99


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": ""},
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": "a", "previous_response_id": "resp_1"},
        {"input": "a", "tools": [{"type": "web_search"}]},
        {"input": "a", "max_output_tokens": 0},
        {"input": "a " * 600},
        {"input": "a", "nonsense": 1},
    ],
)
def test_what_is_not_served_is_refused(http: httpx.Client, body: Any) -> None:
    response = http.post("/v1/responses", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
