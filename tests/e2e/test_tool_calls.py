"""Tools in chats, through the openai package: what a template is given, what comes back as calls, what a grammar forces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from engine.config import ServeConfig
from engine.tokenizer import Tokenizer
from tests.e2e.conftest import tiny_flags
from tests.http_server import http_server
from tests.models import make_tiny_model, make_tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.conftest import ServerProcess

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Ulm", "Köln"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATE = (
    "{% for m in messages %}{% if m.tool_calls %}[{{ m.tool_calls[0].function.arguments.city }}]{% endif %}{{ m.content }}"
    "{% endfor %}{% if tools and not hidden %}{{ '<tool_call>' if false }}{% endif %}"
    "{% if show %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
)
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def echo() -> Iterator[openai.OpenAI]:
    """A client of a server whose answer is the prompt, which is the message."""
    inner = make_tiny_tokenizer()
    inner.chat_template = TEMPLATE
    with http_server(ServeConfig(model_path="scripted"), Tokenizer(inner)) as http:
        yield openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, messages: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **fields).choices[0]


def test_calls_in_an_answer_come_as_tool_calls(echo: openai.OpenAI) -> None:
    choice = ask(echo, say(f"Let me see. {CALL}{CALL}"), tools=TOOLS)
    assert choice.message.content == "Let me see. "
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Ulm"}
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"


def test_an_answer_that_is_nothing_but_calls_has_no_content(echo: openai.OpenAI) -> None:
    assert ask(echo, say(CALL), tools=TOOLS).message.content is None


def test_streamed_calls_are_numbered_and_the_text_before_them_is_streamed(echo: openai.OpenAI) -> None:
    stream = list(echo.chat.completions.create(model="any", messages=say(f"Wait. {CALL}{CALL}"), tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "Wait. "
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        (0, "weather", {"city": "Ulm"}),
        (1, "weather", {"city": "Ulm"}),
    ]
    assert stream[-1].choices[0].finish_reason == "tool_calls"


def test_without_tools_or_with_choice_none_a_call_is_text(echo: openai.OpenAI) -> None:
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = ask(echo, say(CALL), **extra)
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_the_template_gets_the_tools_and_earlier_calls(echo: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [
        *say("How is it? "),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": " sunny "},
    ]
    choice = ask(echo, messages, tools=TOOLS, extra_body={"chat_template_kwargs": {"show": True}})
    assert choice.message.content == "How is it? [Ulm] sunny weather now "


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [{"type": "function", "function": {"name": "not a name"}}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
)
def test_what_does_not_fit_together_is_refused(echo: openai.OpenAI, fields: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(echo, say("a"), **fields)


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("tools"), num_hidden_layers=2)
    inner = make_tiny_tokenizer()
    inner.chat_template = TEMPLATE
    inner.save_pretrained(folder)
    return folder


def test_a_forced_call_is_one_even_from_a_random_model(
    server: Callable[..., ServerProcess], tool_model: Path, tmp_path: Path
) -> None:
    running = server(*tiny_flags(tool_model, tmp_path / "store"))
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    named = {"type": "function", "function": {"name": "weather"}}
    choice = ask(client, say("Hello"), tools=TOOLS, tool_choice=named, max_tokens=300)
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in ("Ulm", "Köln")
    assert choice.finish_reason == "tool_calls"
    stream: Any = client.chat.completions.create(
        model="any", messages=say("Hello"), tools=TOOLS, tool_choice="required", stream=True, max_tokens=300,
        parallel_tool_calls=False,
    )  # fmt: skip
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert len(calls) == 1
    assert calls[0].function.name in ("weather", "now")


def test_tools_need_a_template_that_has_a_place_for_them(tiny: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="no place for tools"):
        ask(client, say("a"), tools=TOOLS)
