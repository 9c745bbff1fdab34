"""Runs an EngineCore in the test's own process: real model, real cache, real store, no HTTP."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.config import ServeConfig
from engine.core import EngineCore
from engine.messages import GenerateRequest, RequestFailed, SamplingParams, TokensOut

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine.messages import TokenLogprobs

__all__ = ["Driver", "prompts", "small_tiers"]

STEPS = 20_000


class Driver:
    """An engine and what it has answered so far, by request id."""

    def __init__(self, model: Path, **flags: Any) -> None:
        values = {"model_path": str(model), "device": "cpu", "page_size": 4, "max_total_tokens": 512, **flags}
        self.core = EngineCore(ServeConfig(**values))
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, TokensOut] = {}
        self.failed: dict[str, RequestFailed] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._ids = itertools.count()

    def add(self, prompt: Sequence[int], tokens: int = 8, **fields: Any) -> str:
        """Queue a greedy request; returns its id."""
        rid = f"r{next(self._ids)}"
        sampling = fields.pop("sampling", SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True))
        refusal = self.core.add(GenerateRequest(rid, list(prompt), sampling, **fields))
        self.tokens[rid] = []
        if refusal is not None:
            self.failed[rid] = refusal
        return rid

    def step(self) -> None:
        """One step, or a wait for what is in flight."""
        out = self.core.step()
        if out is None:
            self.core.cache.wait(0.01)
        for message in out or ():
            match message:
                case TokensOut(rid=rid):
                    self.tokens[rid] += message.token_ids
                    self.last[rid] = message
                    if message.prompt_logprobs is not None:
                        assert rid not in self.prompt_logprobs, "they come once"
                        self.prompt_logprobs[rid] = message.prompt_logprobs
                case RequestFailed(rid=rid):
                    self.failed[rid] = message

    def run(self) -> None:
        """Step until every request has ended."""
        for _ in range(STEPS):
            if self.core.idle:
                return
            self.step()
        raise AssertionError("requests are stuck")

    def settle(self) -> None:
        """Wait until no operation is in flight."""
        for _ in range(STEPS):
            if not self.core.cache.in_flight:
                return
            self.core.cache.wait(0.1)
            self.core.cache.poll()
        raise AssertionError("operations are stuck")

    def answer(self, prompt: Sequence[int], tokens: int = 8, **fields: Any) -> list[int]:
        """Run one request to its end; returns its tokens."""
        rid = self.add(prompt, tokens, **fields)
        self.run()
        assert rid not in self.failed, self.failed[rid]
        return self.tokens[rid]

    def stats(self) -> dict[str, Any]:
        """The cache's counters."""
        return self.core.cache.stats()

    def close(self) -> None:
        """Write down and release everything."""
        self.core.close(10.0)


def prompts() -> list[list[int]]:
    """Conversations that share a beginning, fork, and outgrow a small pool together."""
    rng = np.random.default_rng(5)
    system = rng.integers(3, 259, 30).tolist()
    return [system + rng.integers(3, 259, length).tolist() for length in (5, 40, 33, 61, 18, 50)]


def small_tiers(store: Path) -> dict[str, Any]:
    """Flags of tiers so small that `prompts` go through all of them; the disk is waited for."""
    return {
        "enable_hierarchical_cache": True,
        "max_total_tokens": 128,
        "hicache_ratio": 1.5,
        "hicache_storage_backend": "lmdb",
        "hicache_storage_dir": str(store),
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1}',
        "chunked_prefill_size": 16,
    }
