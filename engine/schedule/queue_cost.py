"""What scheduling a step costs when many are waiting: wall time, with the real scheduler and cache."""

from __future__ import annotations

import gc
from typing import NamedTuple

import numpy as np

from engine.schedule.replay import Job, Machine, Replay, Setting

__all__ = ["QueueCost", "measure"]

STEPS = 300
WARM_STEPS = 50
"""Steps that are not counted: the first ones take the whole queue in, so many requests a step."""


class QueueCost(NamedTuple):
    """Wall time of `Scheduler.schedule` and `computed` over steps in which the queue stays as long as it was."""

    policy: str
    waiting: int
    median_us: float
    p99_us: float
    worst_us: float


def measure(policy: str, waiting: int, seed: int = 0) -> QueueCost:
    """Queue `waiting` requests, half of them of 200 tenants, and time steps; whoever ends is replaced."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, 1 << 29, 1024, dtype=np.int32) for _ in range(200)]
    replay = Replay(Machine(16, 200_000), Setting(policy, max_wait_s=1e9))
    serial = 0

    def arrive() -> None:
        nonlocal serial
        serial += 1
        own = rng.integers(0, 1 << 29, int(rng.integers(20, 300)), dtype=np.int32)
        tokens = np.concatenate((systems[serial % 200], own)) if serial % 2 else own
        replay.add(serial, Job(0.0, tokens, int(rng.integers(2, 30)), routing_key=str(serial % 200), priority=serial % 5))

    for _ in range(waiting):
        arrive()
    for _ in range(WARM_STEPS):
        replay.step()
    gc.collect()
    gc.freeze()
    costs = []
    for _ in range(STEPS):
        while len(replay.scheduler.waiting) < waiting:
            arrive()
        before = replay.scheduling_s
        replay.step()
        costs.append((replay.scheduling_s - before) * 1e6)
    gc.unfreeze()
    return QueueCost(policy, waiting, float(np.median(costs)), float(np.percentile(costs, 99)), max(costs))
