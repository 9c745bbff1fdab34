"""Tool calls are found however the text is cut into pieces, and nothing else is lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tools import ToolCall, detect_format, make_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = frozenset({"weather", "now"})
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
WEATHER = ToolCall("weather", '{"city": "Köln"}')
LLAMA = '{"name": "weather", "parameters": {"city": "Köln"}}'

CASES: Any = [
    ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.\n", [WEATHER]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [WEATHER] * 2),
    ("hermes", f"<tool_call>\n{CALL}\n", "", [WEATHER]),
    ("hermes", '<tool_call>{"name": "weather", "arg', '<tool_call>{"name": "weather", "arg', []),
    ("hermes", "<tool_call>nonsense</tool_call> then text", "<tool_call>nonsense</tool_call> then text", []),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', None, []),
    ("hermes", "a < b and <tool is no call", None, []),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [ToolCall("now", "{}")]),
    ("llama3", LLAMA, "", [WEATHER]),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [WEATHER] * 2),
    ("llama3", 'The answer is {"name": "weather"}', None, []),
    ("llama3", '{"name": "other", "parameters": {}}', None, []),
    ("llama3", '{"a": {"b": 1}}', None, []),
    ("llama3", f'{LLAMA[:-1]}, "x": ', None, []),
    ("required", f"[{LLAMA}, {LLAMA}]", "", [WEATHER] * 2),
    ("required", f"[\n  {LLAMA}\n]", "", [WEATHER]),
    ("none", f"<tool_call>{CALL}</tool_call>", None, []),
]


def parse(kind: Any, pieces: Sequence[str]) -> tuple[str, list[ToolCall]]:
    parser = make_parser(kind, NAMES)
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(part.text for part in parts), [call for part in parts for call in part.calls]


@pytest.mark.parametrize(("kind", "answer", "text", "calls"), CASES)
def test_calls_are_found_whole_and_one_character_at_a_time(kind: str, answer: str, text: str | None, calls: Any) -> None:
    for pieces in ([answer], list(answer)):
        got, found = parse(kind, pieces)
        assert found == calls
        assert got.strip() == (answer if text is None else text).strip()


@given(st.sampled_from(CASES), st.lists(st.integers(1, 40)))
def test_the_cuts_do_not_matter(case: Any, cuts: list[int]) -> None:
    kind, answer, _, calls = case
    pieces, at = [], 0
    for cut in [*cuts, len(answer)]:
        pieces.append(answer[at : at + cut])
        at += cut
    assert parse(kind, pieces)[1] == calls


@given(st.sampled_from(["hermes", "llama3", "required", "none"]), st.lists(st.text('<tol_ca>{}[];" x\n')))
def test_any_text_without_a_call_comes_through(kind: str, pieces: list[str]) -> None:
    got, calls = parse(kind, pieces)
    assert calls == []
    text = "".join(pieces)
    assert got in (text, text.lstrip(), "") or text.endswith(got)
    if kind in ("hermes", "none"):
        assert got == text


def test_a_call_is_given_out_as_soon_as_it_is_whole() -> None:
    parser = make_parser("hermes", NAMES)
    assert parser.feed(f"<tool_call>{CALL}</tool_call").calls == []
    assert parser.feed(">").calls == [WEATHER]
    required = make_parser("required", NAMES)
    assert required.feed(f"[{LLAMA}").calls == [WEATHER]
    assert json.loads(WEATHER.arguments) == {"city": "Köln"}


def test_the_format_is_told_by_the_template() -> None:
    assert detect_format("… <tool_call>\n{…}</tool_call>") == "hermes"
    assert detect_format("… '<|python_tag|>' …") == "llama3"
    assert detect_format("{{ messages }}") == "none"
