"""Workloads for comparing schedule policies: made up, or a slice of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.schedule.replay import Job

if TYPE_CHECKING:
    import numpy.typing as npt

    from engine.schedule.replay import Costs
    from hicache.traces import Trace

    Tokens = npt.NDArray[np.int32]

__all__ = ["block_tokens", "burst", "families", "slice_of", "tenants"]

DECODES = 16
"""Sequences that share a decode step, for an estimate of what answers cost."""
ALONE_SHARE = 0.1
"""A request that shares at most this part of its blocks with others is alone."""


def tenants(seed: int, requests: int = 600, per_s: float = 14.0) -> list[Job]:
    """Interleaved tenants: forty system prompts of 2,000 tokens, short questions; one request in five is alone and longer.

    Tenants are not equally busy (Zipf). Arrivals are a Poisson process.
    """
    rng = np.random.default_rng(seed)
    systems = [_tokens(rng, 2000) for _ in range(40)]
    shares = 1 / np.arange(1, 41)
    arrivals = np.cumsum(rng.exponential(1 / per_s, requests))
    jobs = []
    for arrival_s in arrivals.tolist():
        output = int(rng.integers(16, 128))
        if rng.random() < 0.2:
            jobs.append(Job(arrival_s, _tokens(rng, int(rng.integers(500, 4000))), output, alone=True))
            continue
        system = systems[rng.choice(40, p=shares / shares.sum())]
        jobs.append(Job(arrival_s, np.concatenate((system, _tokens(rng, int(rng.integers(20, 400))))), output))
    return jobs


def burst(requests: int = 32, prefix: int = 2000, own: int = 20, output: int = 8) -> list[Job]:
    """Requests that arrive at once and share a prefix that nobody has computed."""
    rng = np.random.default_rng(0)
    shared = _tokens(rng, prefix)
    return [Job(0.0, np.concatenate((shared, _tokens(rng, own))), output) for _ in range(requests)]


def families() -> list[Job]:
    """Twelve requests of three families, in the order A, B, C, A, ...

    8 tokens of system prompt for all, 8 of few-shot prompts for each family, 3 of question, answers of 8.
    """
    system, shots = range(8), [range(100 * family, 100 * family + 8) for family in (1, 2, 3)]
    prompts = [[*system, *shots[i % 3], *range(1000 + 3 * i, 1003 + 3 * i)] for i in range(12)]
    return [Job(0.0, np.array(prompt, np.int32), 8) for prompt in prompts]


def slice_of(trace: Trace, seed: int, requests: int, load: float, costs: Costs, most_tokens: int) -> list[Job]:
    """`requests` requests of a trace from a place that the seed draws, sped up to a load.

    load: computing time a second, if every block were computed once and steps were full. A block becomes tokens that are the
    same wherever its id is; longer prompts than `most_tokens` are cut.
    """
    rng = np.random.default_rng(seed)
    first = int(rng.integers(0, max(1, len(trace.requests) - requests + 1)))
    chosen = trace.requests[first : first + requests]
    size = block_tokens(trace)
    ids, counts = np.unique(np.concatenate([request.blocks for request in chosen]), return_counts=True)
    work_s = len(ids) * size * costs.token_s + sum(
        request.output_tokens * (costs.token_s + costs.step_s / DECODES) for request in chosen
    )
    stretch = work_s / load / max(chosen[-1].arrival_s - chosen[0].arrival_s, 1e-9)
    jobs = []
    for number, request in enumerate(chosen):
        shared = float((counts[np.searchsorted(ids, request.blocks)] > 1).mean())
        tokens = np.repeat(request.blocks, size)[: min(request.input_tokens, most_tokens) - 1]
        tokens = np.append(tokens, np.int32(-1 - number))  # the last token is its own
        arrival_s = (request.arrival_s - chosen[0].arrival_s) * stretch
        jobs.append(Job(arrival_s, tokens, max(1, request.output_tokens), alone=shared <= ALONE_SHARE))
    return jobs


def block_tokens(trace: Trace) -> int:
    """Tokens a block: what the fullest blocks hold."""
    return max(-(-request.input_tokens // max(1, len(request.blocks))) for request in trace.requests)


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, 1 << 29, count, dtype=np.int32)
