"""Compares schedule policies on workloads."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.schedule.replay import Machine, Replay, Setting
from engine.schedule.workloads import block_tokens, burst, families, slice_of, tenants
from hicache.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from engine.schedule.replay import Job, Report

__all__ = ["Row", "compare", "made_up", "seed_example", "traced"]

SLICE, CACHE_TOKENS, MOST_TOKENS = 800, 3_000_000, 60_000


class Row(NamedTuple):
    """A policy on a workload: means over seeds. TTFT in seconds; alone: of requests without siblings, 0 if there are none."""

    workload: str
    policy: str
    ttft_mean_s: float
    ttft_p99_s: float
    alone_mean_s: float
    alone_p99_s: float
    reused: float


def compare(
    workload: str, make: Callable[[int], list[Job]], machine: Machine, policies: Sequence[str], seeds: int
) -> Iterator[Row]:
    """Run a workload of each seed under each policy."""
    jobs = [make(seed) for seed in range(seeds)]
    gc.collect()
    gc.freeze()
    for policy in policies:
        figures = [_figures(each, Replay(machine, Setting(policy, seed=seed)).run(each)) for seed, each in enumerate(jobs)]
        yield Row(workload, policy, *(round(float(figure), 3) for figure in np.mean(figures, axis=0)))


def _figures(jobs: list[Job], report: Report) -> tuple[float, ...]:
    ttft, alone = np.array(report.ttft_s), np.array([job.alone for job in jobs])
    lonely = ttft[alone] if alone.any() else np.zeros(1)
    asked = sum(len(job.tokens) for job in jobs)
    return ttft.mean(), np.percentile(ttft, 99), lonely.mean(), np.percentile(lonely, 99), sum(report.cached) / asked


def seed_example(policies: Sequence[str]) -> Iterator[Row]:
    """Twelve requests of three families, one at a time, with room for 40 and for 80 tokens."""
    for tokens in (40, 80):
        machine = Machine(1, tokens, max_running=1, shared_tokens=1)
        yield from compare(f"families, {tokens} tokens", lambda seed: families(), machine, policies, 1)


def made_up(policies: Sequence[str], seeds: int) -> Iterator[Row]:
    """Workloads that are made up."""
    yield from seed_example(policies)
    yield from compare("burst of 32", lambda seed: burst(), Machine(16, 48_000), policies, 1)
    for per_s in (10.0, 14.0):
        make = partial(tenants, per_s=per_s)
        yield from compare(f"tenants, {per_s:.0f}/s", make, Machine(16, 48_000), policies, seeds)


def traced(path: Path, load: float, policies: Sequence[str], seeds: int) -> Iterator[Row]:
    """Slices of a trace. Raises ConfigError for a file that is none."""
    trace = read_trace(path)
    size = block_tokens(trace)
    machine = Machine(size, CACHE_TOKENS // size * size, max_running=64)
    yield from compare(
        f"{path.stem}, load {load}",
        lambda seed: slice_of(trace, seed, min(SLICE, len(trace.requests)), load, machine.costs, MOST_TOKENS),
        machine,
        policies,
        seeds,
    )
