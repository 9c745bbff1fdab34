"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopStrings", "StopVerdict"]

_BROKEN = "\ufffd"


class Detokenizer:
    """Turns a growing list of ids into text, piece by piece; the pieces add up to the decoding of the whole list.

        ids   [ ... settled ... | context | fresh ]
                                ^ _context ^ _fresh   ^ len(ids)

    Tokens in `context` were given out already; they are decoded again so that the fresh ones come with the right space before
    them. Fresh tokens wait as long as they end inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0
        self._fresh = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is now certain."""
        self._ids.extend(ids)
        text = self._waiting()
        return "" if text.endswith(_BROKEN) else self._give_out(text)

    def finish(self) -> str:
        """Return what is left; half a character at the very end becomes U+FFFD."""
        return self._give_out(self._waiting())

    def _waiting(self) -> str:
        before = self._decode(self._context, self._fresh)
        return self._decode(self._context, len(self._ids))[len(before) :]

    def _give_out(self, text: str) -> str:
        if text:
            self._context, self._fresh = self._fresh, len(self._ids)
        return text

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip_special)


class StopVerdict(NamedTuple):
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    matched: str | None


class StopStrings:
    """Watches text for the stop string that is complete first, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a stop string is never empty"
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> StopVerdict:
        """Add text; return what is certainly not part of a stop string."""
        if not self._stops:
            return StopVerdict(text, None)
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            return StopVerdict(self._held[:at], stop)
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return StopVerdict(out, None)

    def finish(self) -> str:
        """Return what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
