"""What every generating endpoint does: prompt to ids, ids to sequences, sequences to text."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from engine.client import EngineClient, EngineError
from engine.messages import CachedTokens
from engine.server.errors import ApiError, overloaded, too_long
from engine.server.text import Detokenizer, StopStrings
from hicache.errors import RequestRefused

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from engine.config import ServeConfig
    from engine.messages import FinishReason, GenerateRequest, TokenLogprobs, TokensOut
    from engine.server.metrics import ServerMetrics
    from engine.tokenizer import Tokenizer

__all__ = ["Answer", "Job", "Piece", "Service", "collect", "merge"]

T = TypeVar("T")

LONG_TEXT_CHARS = 2000
"""Longer texts are tokenised off the event loop: half a millisecond or more."""
PART_CHARS = 100
"""What a message or a tool costs to bring into a chat's text, in characters to tokenise."""
MAX_LONG_TEXTS = 256
"""Long texts that may wait for the tokenizer."""


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate, and how its text is shown."""

    request: GenerateRequest
    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    trim_stop: bool = True


class Piece(NamedTuple):
    """What one message of the engine adds to a sequence. `matched` is the stop string or token that ended it.

    prompt_logprobs: with the first piece, if they were asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    matched: str | int | None
    prompt_tokens: int
    cached: CachedTokens
    prompt_logprobs: list[TokenLogprobs] | None = None


class Service:
    """The engine, its tokenizer and its measures, for the endpoints. Used from the server's event loop."""

    def __init__(self, config: ServeConfig, client: EngineClient, tokenizer: Tokenizer, metrics: ServerMetrics) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.started_s = int(time.time())
        self._long_texts = 0
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and answer together, that one sequence can have."""
        return int(self.client.info["context_length"])

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer of this model: not the tokenizer's alone."""
        return frozenset(self.client.info["eos_token_ids"])

    async def encode(self, prompt: str | list[int], *, param: str) -> list[int]:
        """Ids of a prompt that is text or ids already. Raises ApiError."""
        if isinstance(prompt, str):
            return await self.tokenize(prompt, lambda: self.tokenizer.encode(prompt), param=param)
        bad = max(prompt, default=0)
        if bad >= self.tokenizer.vocab_size:
            raise ApiError(400, f"token id {bad} is not in the vocabulary of {self.tokenizer.vocab_size}", param=param)
        return prompt

    async def encode_all(self, prompts: Sequence[str | list[int]], *, param: str) -> list[list[int]]:
        """Ids of many prompts; between two of them others have their turn. Raises ApiError."""
        ids = []
        for prompt in prompts:
            ids.append(await self.encode(prompt, param=param))
            await asyncio.sleep(0)
        return ids

    async def decode(self, ids: list[int], *, skip_special_tokens: bool, param: str) -> str:
        """Text of ids. Raises ApiError."""
        known = await self.encode(ids, param=param)
        decode = partial(self.tokenizer.decode, known, skip_special_tokens=skip_special_tokens)
        return await self._aside(decode) if len(ids) >= LONG_TEXT_CHARS else decode()

    async def tokenize(self, text: str, encode: Callable[[], list[int]], *, param: str, parts: int = 0) -> list[int]:
        """Run `encode`, in a thread if `text` is long; one that can't fit into the context is not even tokenised.

        parts: messages and tools that the text is made of. Raises ApiError.
        """
        try:
            if len(text) + parts * PART_CHARS < LONG_TEXT_CHARS:
                return encode()
            least_tokens = len(text) // self.tokenizer.longest_token_chars
            if least_tokens > self.context_length:
                raise too_long(least_tokens, 0, self.context_length, param=param)
            return await self._aside(encode)
        except RequestRefused as error:
            raise ApiError(400, str(error), param=param) from error

    async def _aside(self, work: Callable[[], T]) -> T:
        """Do what takes long in the tokenizer's thread. Raises ApiError if too much waits for it."""
        if self._long_texts >= MAX_LONG_TEXTS:
            raise overloaded()
        self._long_texts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)
        finally:
            self._long_texts -= 1

    def answer_budget(self, prompt_tokens: int, asked_tokens: int | None, *, param: str) -> int:
        """Most tokens of an answer: what was asked for, or all that fits. Raises ApiError if it doesn't fit."""
        if prompt_tokens == 0:
            raise ApiError(400, f"{param} is empty", param=param)
        room = self.context_length - prompt_tokens
        if room < max(1, asked_tokens or 0):
            raise too_long(prompt_tokens, asked_tokens or 0, self.context_length, param=param)
        return room if asked_tokens is None else asked_tokens

    def check_room(self, sequences: int) -> None:
        """Refuse more sequences than can be queued. Raises ApiError."""
        if self.client.in_flight + sequences > self.config.max_queued_requests:
            raise overloaded()

    def admit(self, jobs: Sequence[Job]) -> None:
        """Refuse what can't be queued: too much waits already, an id is taken, or the engine is gone. Raises ApiError."""
        if not self.client.healthy:
            raise ApiError(503, "the engine is not running", code="engine_dead")
        self.check_room(len(jobs))
        counts = Counter(job.request.rid for job in jobs)
        taken = next((rid for rid, count in counts.items() if count > 1 or self.client.knows(rid)), None)
        if taken is not None:
            raise ApiError(400, f"request id {taken} is in use", param="rid")
        vocab = self.tokenizer.vocab_size
        params = {id(job.request.sampling): job.request.sampling for job in jobs}.values()
        if any(i >= vocab for sampling in params for i in (*sampling.logit_bias, *sampling.stop_token_ids)):
            raise ApiError(400, f"logit_bias and stop_token_ids take ids below {vocab}")

    async def run(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Generate one sequence as text; what follows a stop string is aborted in the engine."""
        text = _SequenceText(self.tokenizer, self.eos_token_ids, job)
        watch = _Stopwatch(self.metrics)
        try:
            async with aclosing(self.client.generate(job.request)) as outs:
                async for out in outs:
                    watch.tokens(len(out.token_ids))
                    piece = text.feed(out)
                    if piece.finish_reason is not None:
                        watch.end(piece.finish_reason)
                        yield piece
                        return
                    yield piece
        except EngineError:
            watch.end("error")
            raise


class _SequenceText:
    """Text of one sequence: detokeniser, then stop strings."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int], job: Job) -> None:
        self._job = job
        self._ends = eos_ids.union(job.request.sampling.stop_token_ids)
        self._characters = Detokenizer(tokenizer, skip_special_tokens=job.skip_special_tokens)
        self._stops = StopStrings(job.stops)

    def feed(self, out: TokensOut) -> Piece:
        """Make the piece of one message."""
        stop_token = self._stop_token(out)
        shown = out.token_ids[:-1] if stop_token is not None and self._job.trim_stop else out.token_ids
        text = self._characters.feed(shown)
        if out.finish_reason is not None:
            text += self._characters.finish()
        verdict = self._stops.feed(text)
        if verdict.matched is not None:
            tail = "" if self._job.trim_stop else verdict.matched
            return self._piece(out, verdict.text + tail, "stop", verdict.matched)
        tail = self._stops.finish() if out.finish_reason is not None else ""
        return self._piece(out, verdict.text + tail, out.finish_reason, stop_token)

    def _stop_token(self, out: TokensOut) -> int | None:
        """The token that ended the sequence, if one did."""
        if out.finish_reason != "stop" or not out.token_ids:
            return None
        return out.token_ids[-1] if out.token_ids[-1] in self._ends else None

    def _piece(self, out: TokensOut, text: str, reason: FinishReason | None, matched: str | int | None) -> Piece:
        return Piece(text, out.token_ids, out.logprobs, reason, matched, out.prompt_tokens, out.cached, out.prompt_logprobs)


class _Stopwatch:
    """Times one sequence."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._start_s = self._last_s = time.perf_counter()
        self._first = True

    def tokens(self, count: int) -> None:
        """Note the arrival of `count` tokens."""
        if count == 0:
            return
        now_s = time.perf_counter()
        if self._first:
            self._metrics.first_token.observe(now_s - self._start_s)
            self._first = False
        else:
            for _ in range(count):
                self._metrics.inter_token.observe((now_s - self._last_s) / count)
        self._last_s = now_s

    def end(self, reason: str) -> None:
        """Note the end of the sequence."""
        self._metrics.sequences.labels(reason).inc()
        self._metrics.e2e.observe(time.perf_counter() - self._start_s)


@dataclass(slots=True)
class Answer:
    """A whole sequence, put together from its pieces."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    matched: str | int | None
    prompt_tokens: int
    cached: CachedTokens
    prompt_logprobs: list[TokenLogprobs] | None = None

    @classmethod
    def empty(cls) -> Answer:
        """An answer nothing of which has arrived."""
        return cls("", [], None, None, None, 0, CachedTokens())

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.token_ids.extend(piece.token_ids)
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs
        self.finish_reason = piece.finish_reason
        self.matched = piece.matched
        self.prompt_tokens = piece.prompt_tokens
        self.cached = piece.cached
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs


async def merge(service: Service, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Run jobs side by side; yield their pieces with the job's index as they come. Leaving early, or an error, aborts all."""
    pieces: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue()

    async def pump(index: int, job: Job) -> None:
        limit_s = service.config.request_timeout or None
        try:
            async with asyncio.timeout(limit_s), aclosing(service.run(job)) as run:
                async for piece in run:
                    pieces.put_nowait((index, piece))
        except TimeoutError:
            pieces.put_nowait(ApiError(504, f"the request took longer than {limit_s:g} s", code="request_timeout"))
        except Exception as error:
            pieces.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, job)) for index, job in enumerate(jobs)]
    try:
        running = len(tasks)
        while running:
            item = await pieces.get()
            if isinstance(item, Exception):
                raise item
            running -= item[1].finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(service: Service, jobs: Sequence[Job]) -> list[Answer]:
    """Run jobs side by side to their ends."""
    answers = [Answer.empty() for _ in jobs]
    async with aclosing(merge(service, jobs)) as pieces:
        async for index, piece in pieces:
            answers[index].add(piece)
    return answers
