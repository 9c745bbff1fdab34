"""An engine process without a model, for tests of the HTTP side: it speaks the real messages over the real pipes.

A request's answer is its own prompt, one token a message. The extra key tells it to do otherwise:
`slow` waits between tokens, `fail:STATUS` fails the request, `die` ends the process at once, `die-later` after one token,
`mute` never answers, `burst` sends all tokens in one message.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from engine.messages import (
    AbortRequest,
    CachedTokens,
    CacheHint,
    ControlReply,
    ControlRequest,
    EngineDown,
    EngineReady,
    GenerateRequest,
    RequestFailed,
    Shutdown,
    TokenLogprobs,
    TokensOut,
    encode,
)
from engine.pipes import EnginePipes

if TYPE_CHECKING:
    from engine.config import ServeConfig

__all__ = ["CONTEXT_LENGTH", "EOS_TOKEN_IDS", "run_crashing", "run_half_connected", "run_refusing", "run_scripted"]

CONTEXT_LENGTH = 512
EOS_TOKEN_IDS = (0, 2)
"""End tokens: the demo model's own, and one more."""
INFO = {"model": "scripted", "context_length": CONTEXT_LENGTH, "eos_token_ids": EOS_TOKEN_IDS}


class Scripted:
    """The loop's state: what is being answered, and what was heard."""

    def __init__(self, pipes: EnginePipes) -> None:
        self.pipes = pipes
        self.running: deque[tuple[GenerateRequest, int]] = deque()
        self.received: list[dict[str, Any]] = []
        self.aborted: list[str] = []

    def take(self, message: GenerateRequest | AbortRequest | ControlRequest | CacheHint) -> None:
        match message:
            case GenerateRequest(extra_key="die"):
                os._exit(17)
            case GenerateRequest(extra_key=key, rid=rid) if key.startswith("fail:"):
                self.pipes.send(RequestFailed(rid, "scripted failure", int(key.removeprefix("fail:"))))
            case GenerateRequest():
                self.received.append(
                    {
                        "rid": message.rid,
                        "salt": message.cache_salt,
                        "priority": message.priority,
                        "routing_key": message.routing_key,
                        "pin": message.pin and message.pin.tokens,
                        "max_new_tokens": message.sampling.max_new_tokens,
                    }
                )
                self.running.append((message, 0))
            case AbortRequest(rid=rid):
                self.aborted.append(rid)
                self.running = deque(entry for entry in self.running if entry[0].rid != rid)
            case CacheHint(id=id_, op=op):
                self.received.append({"hint": op, "tokens": message.input_ids, "ttl_s": message.ttl_s})
                self.pipes.send(ControlReply(id_, value={"tokens": len(message.input_ids)}))
            case ControlRequest(id=id_, op="stats"):
                state = {"received": self.received, "aborted": self.aborted, "running": len(self.running)}
                self.pipes.send(ControlReply(id_, value=state))
            case ControlRequest(id=id_, op="metrics"):
                self.pipes.send(ControlReply(id_, value="# TYPE scripted_total counter\nscripted_total 1.0\n"))
            case ControlRequest(id=id_, op="flush"):
                self.pipes.send(ControlReply(id_, value={"flushed_pages": 3}))
            case ControlRequest(id=id_, op=op):
                self.pipes.send(ControlReply(id_, error=f"unknown op {op}"))

    def step(self) -> None:
        """One token for each request that gets one."""
        for _ in range(len(self.running)):
            request, done = self.running.popleft()
            if request.extra_key == "mute":
                self.running.append((request, done))
                continue
            count = min(len(request.input_ids), request.sampling.max_new_tokens)
            end = count if request.extra_key == "burst" else min(count, done + 1)
            ids = request.input_ids[done:end]
            reason = None if end < count else ("stop" if count == len(request.input_ids) else "length")
            self.pipes.send(self._out(request, ids, reason, first=done == 0))
            if request.extra_key == "die-later":
                self.pipes.close()
                os._exit(17)
            if reason is None:
                self.running.append((request, end))

    def _out(self, request: GenerateRequest, ids: list[int], reason: Any, *, first: bool) -> TokensOut:
        top = [(i, -0.5 - i) for i in range(request.top_logprobs or 0)]
        logprobs = None if request.top_logprobs is None else [TokenLogprobs(-0.25, top) for _ in ids]
        scored = None
        if first and request.score_from is not None:
            scored = [TokenLogprobs(-0.125 * i, top) for i in range(request.score_from + 1, len(request.input_ids))]
        cached = CachedTokens(device=4, host=2, disk=1)
        return TokensOut(request.rid, ids, len(request.input_ids), cached, logprobs, reason, scored)

    @property
    def wait_s(self) -> float:
        if not self.running:
            return 1.0
        patient = all(request.extra_key in ("slow", "mute") for request, _ in self.running)
        return 0.02 if patient else 0.0


def run_scripted(config: ServeConfig, to_engine: str, to_server: str) -> None:
    """Answer until a Shutdown."""
    with EnginePipes(to_engine, to_server) as pipes:
        state = Scripted(pipes)
        pipes.send(EngineReady(INFO | {"page_size": config.page_size}))
        while True:
            pipes.wait(state.wait_s)
            for message in pipes.receive():
                if isinstance(message, Shutdown):
                    pipes.send(EngineDown())
                    return
                state.take(message)
            state.step()


def run_refusing(config: ServeConfig, to_engine: str, to_server: str) -> None:
    """Refuse the model, as an engine does that can't run it."""
    with EnginePipes(to_engine, to_server) as pipes:
        pipes.send(EngineDown(f"{config.model_path}: scripted refusal", refused=True))


def run_half_connected(config: ServeConfig, to_engine: str, to_server: str) -> None:
    """Say "ready" while the pipe that requests come by is not connected yet, as a busy machine may order the two."""
    context = zmq.Context()
    out = context.socket(zmq.PUSH)
    out.connect(to_server)
    out.send(encode(EngineReady(INFO)))
    out.close()
    context.term()
    time.sleep(0.2)
    run_scripted(config, to_engine, to_server)


def run_crashing(config: ServeConfig, to_engine: str, to_server: str) -> None:
    """End before being ready."""
    os._exit(9)
