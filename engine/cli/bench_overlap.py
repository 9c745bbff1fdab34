"""`hicache bench overlap`: a store that is as slow as computing, and ten times slower: recompute, read, or both at once.

One conversation is computed and written down. Then engines are started on its store, slowed by a fault plan so that reading the
history takes as long as computing it, and ten times as long; each way takes its turn in every run.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from engine.cli.in_process import answer, make_core, random_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core import EngineCore

__all__ = ["overlap"]

SUFFIX_TOKENS = 32
WAITS, OVERLAPS = "wait_complete", "timeout"


class Figure(NamedTuple):
    """Medians of one store speed in seconds, and what the planner meant to compute and what was computed, in tokens.

    slowness: how long reading takes, by the fault plan, as a multiple of computing. read_s: None where it was not tried.
    """

    slowness: float
    recompute_s: float
    read_s: float | None
    both_s: float
    planned_tokens: float
    computed_tokens: float

    @property
    def gain(self) -> float:
        """How many times quicker both at once are than the better of the two alone."""
        return min(self.recompute_s, self.read_s or self.recompute_s) / self.both_s


def overlap(
    model_path: Annotated[str, typer.Option(help="Model to run.")] = "smollm2",
    tokens: Annotated[int, typer.Option(help="Length of the history.")] = 4096,
    runs: Annotated[int, typer.Option(help="Runs a case; medians are shown.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line a store speed instead of a table.")] = False,
) -> None:
    """Time to first token when the history is on a slow disk: computed, read, or front computed while the back is read."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        history = random_tokens(tokens, 0)
        with _engine(model_path, folder, tokens, OVERLAPS, 0.0) as core:
            _ttft(core, history)
            compute_s = statistics.median(_ttft(core, history, cache_salt=f"again {run}") for run in range(runs))
            pages = core.cache.geometry.pages(tokens)
        figures: list[Figure] = []
        seeds = itertools.count(1)  # no two prompts end alike
        for slowness in (1.0, 10.0):
            figures.append(_figure(model_path, folder, history, slowness, compute_s / pages, runs, seeds))
            _show(figures[-1], as_json, first=len(figures) == 1)


def _figure(
    model_path: str, folder: str, history: list[int], slowness: float, page_s: float, runs: int, seeds: Iterator[int]
) -> Figure:
    seconds = slowness * page_s
    read_s = None
    if slowness <= 1:  # ten times slower, it would be known before it ends
        with _engine(model_path, folder, len(history), WAITS, seconds) as core:
            read_s = statistics.median(_from_disk(core, history, next(seeds)) for _ in range(runs))
    with _engine(model_path, folder, len(history), OVERLAPS, seconds) as core:
        _ttft(core, history, cache_salt="first")
        _from_disk(core, history, next(seeds))  # the store's speed is found out
        recompute, both, planned, computed = [], [], [], []
        for _ in range(runs):
            seed = next(seeds)
            recompute.append(_ttft(core, history + _suffix(seed), cache_salt=f"run {seed}"))
            before = _met(core)
            both.append(_from_disk(core, history, seed))
            after = _met(core)
            planned.append(after[0] - before[0])
            computed.append(after[1] - before[1])
    medians = (statistics.median(each) for each in (both, planned, computed))
    return Figure(slowness, statistics.median(recompute), read_s, *medians)


@contextmanager
def _engine(model_path: str, folder: str, tokens: int, policy: str, page_s: float) -> Iterator[EngineCore]:
    """An engine whose store takes `page_s` seconds longer for each page that is read."""
    fault = {"kind": "slow", "every": 1, "method": "get_many", "page_seconds": page_s}
    extra = {"prefetch_timeout_base": 1e6, "faults": {"faults": [fault] if page_s else []}}
    flags: dict[str, Any] = {
        "max_total_tokens": 2 * tokens,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "lmdb",
        "hicache_storage_dir": folder,
        "hicache_storage_prefetch_policy": policy,
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
    core = make_core(model_path, **flags)
    try:
        yield core
    finally:
        core.close(60.0)


def _from_disk(core: EngineCore, history: list[int], seed: int) -> float:
    """Time to first token with the history on disk and nowhere else."""
    _settle(core)
    core.cache.flush()
    return _ttft(core, history + _suffix(seed))


def _settle(core: EngineCore) -> None:
    """Wait for writes of earlier requests, which would take time from what is measured."""
    while core.cache.in_flight:
        core.cache.wait(0.1)
        core.cache.poll()


def _ttft(core: EngineCore, prompt: list[int], cache_salt: str = "") -> float:
    _settle(core)
    begun_s = time.perf_counter()
    answer(core, prompt, 1, cache_salt)
    return time.perf_counter() - begun_s


def _met(core: EngineCore) -> tuple[float, float]:
    """Tokens that were planned and that were really computed so far by requests whose backs were read."""
    sample = core.cache.metrics.registry.get_sample_value
    planned, computed = (sample("hicache_overlap_tokens_total", {"what": what}) or 0.0 for what in ("planned", "computed"))
    return planned, computed


def _suffix(seed: int) -> list[int]:
    return random_tokens(SUFFIX_TOKENS, seed)


def _show(figure: Figure, as_json: bool, first: bool) -> None:
    if as_json:
        print(json.dumps({**figure._asdict(), "gain": round(figure.gain, 3)}), flush=True)
        return
    if first:
        print(f"{'reading':>8} {'recompute':>10} {'read':>9} {'both':>9} {'gain':>6} {'planned':>9} {'computed':>9}")
    read = "-" if figure.read_s is None else f"{figure.read_s:.3f}s"
    print(
        f"{figure.slowness:>7.0f}x {figure.recompute_s:>9.3f}s {read:>9} {figure.both_s:>8.3f}s {figure.gain:>6.2f} "
        f"{figure.planned_tokens:>9.0f} {figure.computed_tokens:>9.0f}",
        flush=True,
    )
