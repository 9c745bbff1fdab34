"""An engine in the benchmark's own process, and requests to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.model import LoadedModel

__all__ = ["answer", "ask", "drain", "make_core", "random_tokens"]


def make_core(model_path: str, model: LoadedModel | None = None, **flags: object) -> EngineCore:
    """An engine on the CPU in float32; who makes it closes it. Imported here, so that other commands start without torch."""
    from engine.config import load_config
    from engine.core import EngineCore

    return EngineCore(load_config({"model_path": model_path, "dtype": "float32", "device": "cpu", **flags}), model)


def random_tokens(count: int, seed: int) -> list[int]:
    """A prompt that no other seed begins with."""
    import random

    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(count)]


def ask(core: EngineCore, prompt: list[int], output_tokens: int, cache_salt: str = "") -> None:
    """Queue a greedy request that answers with exactly so many tokens."""
    from engine.messages import GenerateRequest, SamplingParams

    sampling = SamplingParams(max_new_tokens=output_tokens, temperature=0, ignore_eos=True)
    refusal = core.add(GenerateRequest(os.urandom(8).hex(), prompt, sampling, cache_salt=cache_salt))
    assert refusal is None, refusal


def drain(core: EngineCore) -> None:
    """Run steps until nobody waits for any."""
    while not core.idle:
        if core.step() is None:
            core.cache.wait(0.001)


def answer(core: EngineCore, prompt: list[int], output_tokens: int, cache_salt: str = "") -> None:
    """Have one request answered."""
    ask(core, prompt, output_tokens, cache_salt)
    drain(core)
