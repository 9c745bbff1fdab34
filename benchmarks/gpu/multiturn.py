"""Time to the first token of a conversation's later turns, on a large model: recomputed, from the device, from the host, from
disk. Conversations take turns, so that a small device pool, and then a small host pool, has lost each when it comes back.

At the end, whether all memory was given back.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil
import torch

from benchmarks.gpu.common import device_option, random_model
from benchmarks.gpu.figures import Figure, emit
from engine.config import ServeConfig
from engine.core import EngineCore
from engine.messages import GenerateRequest, SamplingParams, TokensOut

if TYPE_CHECKING:
    from engine.model import LoadedModel

PAGE_SIZE, ANSWER, ROUNDS = 32, 8, 3
KEPT_MIB = {"device": 64, "host": 1024}
"""Memory that may stay in use when all engines have been closed: what libraries load and keep. Pools are many times that."""


def main() -> None:
    """Run every setup on the same model and the same conversations."""
    device = device_option()
    conversations, first, more = (8, 8192, 256) if device.type == "cuda" else (8, 256, 64)
    model = random_model(device)
    longest = first + (ROUNDS - 1) * more + ROUNDS * ANSWER + 2 * PAGE_SIZE
    everything, little = conversations * longest, int(1.3 * longest)
    tiers: dict[str, Any] = {"enable_hierarchical_cache": True, "max_total_tokens": little}
    setups: dict[str, dict[str, Any]] = {
        "recomputed": {"disable_radix_cache": True, "max_total_tokens": everything},
        "from the device": {"max_total_tokens": everything},
        "from the host": {**tiers, "hicache_ratio": 1.1 * everything / little},
        "from disk": {
            **tiers,
            "hicache_ratio": 2.0,
            "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1}',
            "hicache_storage_backend": "lmdb",
            "hicache_storage_size": "20GB",
            "hicache_storage_prefetch_policy": "wait_complete",
        },
    }
    before = _in_use(device)
    medians: dict[str, float] = {}
    for name, flags in setups.items():
        with tempfile.TemporaryDirectory(prefix="hicache-gpu-") as folder:
            store: dict[str, Any] = {"hicache_storage_dir": folder} if "hicache_storage_backend" in flags else {}
            config = ServeConfig(
                model_path="random",
                device="cuda" if device.type == "cuda" else "cpu",
                page_size=PAGE_SIZE,
                disable_cuda_graph=True,
                chunked_prefill_size=4096,
                **flags,
                **store,
            )
            times, hits, backend = _converse(config, model, conversations, first, more)
        medians[name] = statistics.median(times)
        limit = None if name == "recomputed" else medians["recomputed"]
        raw = {"times_s": times, "hit_tokens": hits, "attention_backend": backend}
        shares = " ".join(f"{tier} {tokens / max(1, sum(hits.values())):.0%}" for tier, tokens in hits.items() if tokens)
        what = f"TTFT after {first} tokens, {name}" + (f" ({shares})" if shares else "")
        emit(Figure("multiturn", what, medians[name] * 1e3, "ms", None if limit is None else limit * 1e3, raw=raw))
    for place, kept, least in zip(("device", "host"), _in_use(device), before, strict=True):
        emit(Figure("multiturn", f"{place} memory kept after closing", kept - least, "MiB", KEPT_MIB[place]))


def _converse(
    config: ServeConfig, model: LoadedModel, conversations: int, first: int, more: int
) -> tuple[list[float], dict[str, int], str]:
    """Return the times of turns with a history, the hits of the whole run by tier, and the attention backend."""
    rng = np.random.default_rng(1)
    core = EngineCore(config, model)
    histories = [rng.integers(3, 500, first).tolist() for _ in range(conversations)]
    times = []
    for number in range(ROUNDS):
        for i, history in enumerate(histories):
            ttft_s, answer = _ask(core, f"{number}-{i}", history)
            histories[i] = history + answer + rng.integers(3, 500, more).tolist()
            if number:
                times.append(ttft_s)
    hits = cast("dict[str, int]", core.cache.stats()["hicache_hit_tokens_total"])
    backend: str = core.info()["attention_backend"]
    core.close(0.0)
    return times, hits, backend


def _ask(core: EngineCore, rid: str, prompt: list[int]) -> tuple[float, list[int]]:
    """Run one request to its end, and let its pages go where they are kept; returns its TTFT and its answer."""
    sampling = SamplingParams(max_new_tokens=ANSWER, temperature=0, ignore_eos=True)
    begun_s = time.perf_counter()
    refusal = core.add(GenerateRequest(rid, prompt, sampling))
    if refusal is not None:
        raise SystemExit(f"refused: {refusal.message}")
    ttft_s, answer = 0.0, []
    while not core.idle:
        out = core.step()
        if out is None:
            core.cache.wait(0.001)
        for message in out or ():
            if not isinstance(message, TokensOut):
                raise SystemExit(f"failed: {message}")
            ttft_s = ttft_s or time.perf_counter() - begun_s
            answer += message.token_ids
    deadline_s = time.monotonic() + 5
    while core.cache.in_flight and time.monotonic() < deadline_s:
        core.cache.wait(0.01)
        core.cache.poll()
    return ttft_s, answer


def _in_use(device: torch.device) -> tuple[float, float]:
    """MiB that torch has allocated on the GPU (0 without one), and that the process holds in host memory."""
    gc.collect()
    allocated = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        allocated = torch.cuda.memory_allocated(device)
    return allocated / 2**20, psutil.Process().memory_info().rss / 2**20


if __name__ == "__main__":
    main()
