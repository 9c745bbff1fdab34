"""Tool calls in what a model writes: found in each family's own format, piece by piece as the text comes.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>, anywhere in the text (Hermes, Qwen)
    llama3    {"name": …, "parameters": {…}}; …  as the whole answer, perhaps after <|python_tag|> (Llama 3)
    required  [{"name": …, "parameters": {…}}, …]  the whole answer, which a grammar holds to it (any model)

What does not parse, or names a tool that was not offered, is text like any other.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Parsed", "PlainText", "ToolCall", "ToolFormat", "ToolParser", "detect_format", "make_parser"]

ToolFormat = Literal["hermes", "llama3", "none"]
_DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
    """A call: the tool's name and its arguments as JSON text."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """What is certain so far: text to show, then calls."""

    text: str
    calls: list[ToolCall]


class ToolParser(Protocol):
    """Separates text from tool calls. One answer's; gives every character and every call out once."""

    def feed(self, text: str) -> Parsed:
        """Add text; return what is certain now."""
        ...

    def finish(self) -> Parsed:
        """Return what was held back: the answer has ended."""
        ...


def detect_format(chat_template: str) -> ToolFormat:
    """The format that a chat template teaches its model."""
    if "<tool_call>" in chat_template:
        return "hermes"
    if "<|python_tag|>" in chat_template or ('"parameters"' in chat_template and "ipython" in chat_template):
        return "llama3"
    return "none"


def make_parser(kind: ToolFormat | Literal["required"], names: Collection[str]) -> ToolParser:
    """A parser of a format for one answer. names: of the tools that were offered."""
    match kind:
        case "hermes":
            return HermesParser(names)
        case "llama3":
            return ObjectParser(names, opener="{", separators="; \t\n", tag="<|python_tag|>")
        case "required":
            return ObjectParser(names, opener="[", separators="[], \t\n", tag="")
        case "none":
            return PlainText()


class PlainText:
    """Finds no calls."""

    def feed(self, text: str) -> Parsed:
        """All of it is text."""
        return Parsed(text, [])

    def finish(self) -> Parsed:
        """Nothing was held back."""
        return Parsed("", [])


class HermesParser:
    """Calls between tags, anywhere in the text. What may be the beginning of a tag waits."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""

    def feed(self, text: str) -> Parsed:
        """Add text; return what is certain now."""
        self._held += text
        shown = ""
        calls: list[ToolCall] = []
        while (at := self._held.find(self.OPEN)) >= 0:
            end = self._held.find(self.CLOSE, at)
            shown += self._held[:at]
            self._held = self._held[at:]
            if end < 0:
                return Parsed(_without_blank(shown, calls), calls)
            end += len(self.CLOSE) - at
            block, self._held = self._held[:end], self._held[end:]
            call = _as_call(block.removeprefix(self.OPEN).removesuffix(self.CLOSE), self._names)
            if call is None:
                shown += block
            else:
                calls.append(call)
        keep = _overlap(self._held, self.OPEN)
        shown += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return Parsed(_without_blank(shown, calls), calls)

    def finish(self) -> Parsed:
        """A block that was not closed is a call if it is whole, else text."""
        held, self._held = self._held, ""
        call = _as_call(held.removeprefix(self.OPEN), self._names) if held.startswith(self.OPEN) else None
        return Parsed(held, []) if call is None else Parsed("", [call])


class ObjectParser:
    """An answer that is nothing but calls, as JSON objects with separators between them; any other is text from the start on.

    opener: how such an answer begins. tag: what may stand before it.
    """

    def __init__(self, names: Collection[str], *, opener: str, separators: str, tag: str) -> None:
        self._names = names
        self._opener = opener
        self._separators = separators
        self._tag = tag
        self._held = ""
        self._state: Literal["undecided", "calls", "text"] = "undecided"

    def feed(self, text: str) -> Parsed:
        """Add text; return what is certain now."""
        self._held += text
        if self._state == "undecided":
            self._decide()
        match self._state:
            case "undecided":
                return Parsed("", [])
            case "text":
                return self._rest()
            case "calls":
                return self._calls() if "}" in text else Parsed("", [])

    def finish(self) -> Parsed:
        """What is not a whole call is text; separators are nothing."""
        if self._state == "calls" and not self._held.strip(self._separators):
            return Parsed("", [])
        return self._rest()

    def _decide(self) -> None:
        begun = self._held.lstrip()
        if self._tag and begun.startswith(self._tag):
            begun = begun.removeprefix(self._tag).lstrip()
        if begun.startswith(self._opener):
            self._state, self._held = "calls", begun
        elif begun and not (self._tag and self._tag.startswith(begun)):
            self._state = "text"

    def _calls(self) -> Parsed:
        calls: list[ToolCall] = []
        while body := self._held.lstrip(self._separators):
            try:
                value, end = _DECODER.raw_decode(body)
            except (ValueError, RecursionError):
                return Parsed("", calls)
            call = _call_of(value, self._names)
            if call is None:
                self._state = "text"
                return Parsed(self._rest().text, calls)
            calls.append(call)
            self._held = body[end:]
        return Parsed("", calls)

    def _rest(self) -> Parsed:
        held, self._held = self._held, ""
        return Parsed(held, [])


def _as_call(text: str, names: Collection[str]) -> ToolCall | None:
    try:
        return _call_of(json.loads(text), names)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any, names: Collection[str]) -> ToolCall | None:
    """The call that a JSON value stands for, if it does."""
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _without_blank(text: str, calls: list[ToolCall]) -> str:
    """No text where there are but blanks around calls."""
    return "" if calls and not text.strip() else text


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
