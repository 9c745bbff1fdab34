"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopStrings", "StopVerdict"]

MOST_WAITING = 16
"""Tokens that wait for the end of a character, at most; no character is so long."""
HALF_CHARACTER = 3
"""Broken characters, at most, that the beginning of a whole one shows as: one for each of its bytes, with some tokenizers."""
_BROKEN = "\ufffd"


class Detokenizer:
    """Turns a growing list of ids into text, piece by piece; the pieces add up to the decoding of the whole list.

        ids   [ context | fresh ]     what was before them is forgotten
                        ^ _fresh

    Tokens in `context` were given out already; they are decoded again so that the fresh ones come with the right space before
    them. Fresh tokens wait as long as they end inside a character. Where no token ends one, which is no text or cut across
    its characters, MOST_WAITING of them are given out but for the last character. So each token costs the same.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._ids: list[int] = []
        self._fresh = 0
        self._given = 0  # characters of the text of `_ids` that were given out

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is now certain."""
        shown = [i for i in ids if i not in self._skipped]
        if not shown:
            return ""
        self._ids.extend(shown)
        text = self._decode()
        broken = len(text) - len(text.rstrip(_BROKEN))
        if (broken or len(text) <= self._given) and len(self._ids) - self._fresh <= MOST_WAITING:
            return ""
        certain = len(text) - min(broken, HALF_CHARACTER)
        out = text[self._given : certain]
        self._settle(self._fresh if certain == len(text) else len(self._ids) - MOST_WAITING // 2, len(text) - certain)
        return out

    def finish(self) -> str:
        """Return what is left; half a character at the very end becomes U+FFFD."""
        return self._decode()[self._given :]

    def _settle(self, count: int, waiting: int) -> None:
        """Forget the first `count` ids; the others are context from now on, but for their last `waiting` characters."""
        del self._ids[:count]
        self._fresh = len(self._ids)
        self._given = max(0, len(self._decode()) - waiting)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)


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
