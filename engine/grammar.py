"""Answers held to a grammar: a JSON schema, a regular expression or an EBNF decides which tokens may come next.

A grammar is compiled by a thread of its own, since a large one takes up to a second; requests wait for it outside of the
scheduler. What was compiled is kept and copied, so `n` answers, or the next request with the same schema, wait for nothing.

Masks are computed in the steps that all requests share, so what one may cost is limited: a grammar that exceeds it is refused,
at once where its first masks show it, or where the answer gets to the part that does.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from hicache.errors import RequestRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llguidance import LLTokenizer
    from numpy.typing import NDArray

    from engine.messages import GenerateRequest, GrammarSpec
    from engine.tokenizer import Tokenizer

__all__ = ["Compiled", "GrammarState", "Grammars"]

logger = logging.getLogger(__name__)

KEPT = 128
"""Compiled grammars kept for later requests."""
MAX_SOURCE_CHARS = 1 << 20
MAX_SYMBOLS = 30_000
"""Symbols in the productions of a grammar: time to compile grows with their square."""
MAX_STEP_ITEMS = {"json_schema": 50_000, "regex": 10_000, "ebnf": 10_000}
"""Parser items that a mask may take. Those of an ambiguous EBNF cost the more the more there are, up to seconds in all."""
FIRST_TOKENS_TRIED = 8
WHITESPACE = r"(\n[ \t]{0,40}| )?"
"""What may stand between two parts of a JSON text: without a bound, a weak model can go on with blanks for ever."""


class GrammarState:
    """Where one sequence stands in its grammar. Used by the loop's thread; a retracted request keeps it."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the answer can't go on: the grammar costs more than a step may."""
        return _first_lines(self._matcher.get_error()) if self._matcher.is_error() else None

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (vocab,) with minus infinity for every token that may not come next. After an `error` only the end may."""
        bits = _mask(self._matcher)
        allowed = torch.zeros(logits.shape[0], dtype=torch.bool)
        count = min(len(bits), logits.shape[0])
        allowed[:count] = torch.from_numpy(bits[:count]).bool()
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def advance(self, token: int) -> None:
        """Note a sampled token. One that may not follow ends the sequence (there is none: `mask` came before)."""
        self._matcher.consume_token(token)


class Compiled(NamedTuple):
    """A waiting request whose grammar is done: `state`, or the reason why there is none."""

    message: GenerateRequest
    state: GrammarState | None
    error: str | None


class Grammars:
    """Compiles the grammars of requests, and holds those requests until it is done. Owned by the loop's thread."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._ll: LLTokenizer | None = None  # made by the thread when it is first needed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._kept: OrderedDict[GrammarSpec, Future[LLMatcher]] = OrderedDict()
        self._waiting: dict[str, tuple[GenerateRequest, Future[LLMatcher]]] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def __contains__(self, rid: str) -> bool:
        return rid in self._waiting

    def submit(self, message: GenerateRequest) -> None:
        """Let a request wait for its grammar."""
        spec = message.sampling.grammar
        assert spec is not None
        future = self._kept.pop(spec, None)
        if future is None:
            future = self._thread.submit(self._compile, spec)
        self._kept[spec] = future
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        self._waiting[message.rid] = (message, future)

    def discard(self, rid: str) -> None:
        """Let a request wait no longer, if it does."""
        self._waiting.pop(rid, None)

    def discard_all(self) -> list[str]:
        """Let no request wait any longer; returns the ids of those that did."""
        rids = list(self._waiting)
        self._waiting.clear()
        return rids

    def take_ready(self) -> Iterator[Compiled]:
        """Requests whose grammars are compiled, or can't be; they wait no longer."""
        for rid, (message, future) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[rid]
            error = future.exception()
            if error is None:
                yield Compiled(message, GrammarState(future.result().deep_copy()), None)
            elif isinstance(error, RequestRefused):
                yield Compiled(message, None, str(error))
            else:
                logger.error("a grammar could not be compiled", exc_info=error)
                yield Compiled(message, None, f"the grammar can't be compiled: {type(error).__name__}")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        """Compile a grammar (the thread's work). Raises RequestRefused."""
        if len(spec.source) > MAX_SOURCE_CHARS:
            raise RequestRefused(f"a grammar has at most {MAX_SOURCE_CHARS} characters")
        if self._ll is None:
            self._ll = self._tokenizer.for_grammars(sorted(self._eos_ids))
        limits = LLParserLimits(max_grammar_size=MAX_SYMBOLS, step_max_items=MAX_STEP_ITEMS[spec.kind], verbose_errors=False)
        matcher = LLMatcher(self._ll, _as_llguidance(spec), log_level=0, limits=limits)
        for trial in (matcher, *_beginnings(matcher)):
            if trial.is_error():
                raise RequestRefused(f"the {spec.kind} can't be used as a grammar: {_first_lines(trial.get_error())}")
        return matcher


def _mask(matcher: LLMatcher) -> NDArray[np.uint8]:
    """Which tokens may come next: (vocab, rounded up to 32), 1 for those."""
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")


def _beginnings(matcher: LLMatcher) -> Iterator[LLMatcher]:
    """Copies that have computed the first mask and, each after another first token, the second; few, if many may be first."""
    trial = matcher.deep_copy()
    first = np.flatnonzero(_mask(trial))[:FIRST_TOKENS_TRIED]
    yield trial
    for token in first.tolist():
        trial = matcher.deep_copy()
        trial.consume_token(token)
        trial.compute_bitmask()
        yield trial


def _as_llguidance(spec: GrammarSpec) -> str:
    """The library's own form of a grammar. Raises RequestRefused."""
    try:
        match spec.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(spec.source, overrides={"whitespace_pattern": WHITESPACE})
            case "regex":
                return LLMatcher.grammar_from_regex(spec.source)
            case "ebnf":
                return LLMatcher.grammar_from_lark(gbnf_to_lark(spec.source))
    except (Exception, RecursionError) as error:  # the converter of EBNF raises plain Exceptions
        raise RequestRefused(f"the {spec.kind} can't be read: {_first_lines(str(error))}") from None


def _first_lines(text: str) -> str:
    """An error in one line, without the parser's state and its advice to who writes grammars by hand."""
    return " ".join(re.split("<state>|<non-verbose|; (?:consider|try) ", text)[0].split())[:300]
