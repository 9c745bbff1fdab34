"""Runs a workload through the scheduler and the cache, on a modelled clock: no model, no bytes, no waiting.

What a step takes is computed from its chunks: a fixed part, a part for each token, and a part that grows with the token's
position, as attention does.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

from engine.messages import GenerateRequest, SamplingParams
from engine.request import Request
from engine.sampler import SamplingState
from engine.schedule_policy import make_policy
from engine.scheduler import Limits, Scheduler
from hicache.cache import HiCache
from hicache.config import CacheConfig
from hicache.geometry import LayerGeometry, PageGeometry
from hicache.keys import Namespace
from hicache.pools import HostPool
from hicache.simulated import InstantCopier

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from engine.scheduler import Step

__all__ = ["Clock", "Costs", "Job", "Machine", "Replay", "Report", "Setting"]

ANSWER = 1 << 30
"""Answers are made of tokens from here on, another one for each request: nobody's prompt continues an answer."""


class Job(NamedTuple):
    """A request to come. alone: whether it shares nothing worth mentioning with any other one."""

    arrival_s: float
    tokens: npt.NDArray[np.int32]
    output_tokens: int
    alone: bool = False
    salt: str = ""
    priority: int = 0
    routing_key: str = ""


class Costs(NamedTuple):
    """What a step takes: step_s + for each token token_s + position_s * its position. The defaults are those of an 8B model
    on one large GPU, roughly: 20,000 tokens/s of prefill at position 0, half of that at 50,000."""

    step_s: float = 0.008
    token_s: float = 5e-5
    position_s: float = 1e-9

    def of(self, step: Step) -> float:
        """Seconds that a step takes."""
        seconds = self.step_s
        for chunk in step.batch.chunks:
            count = len(chunk.tokens)
            seconds += count * (self.token_s + self.position_s * (chunk.start + chunk.end - 1) / 2)
        return seconds


class Machine(NamedTuple):
    """What the workload runs on. Sizes are in tokens."""

    page_size: int
    device_tokens: int
    host_tokens: int = 0
    max_running: int = 32
    prefill_tokens: int = 2048
    shared_tokens: int = 32
    costs: Costs = Costs()


class Setting(NamedTuple):
    """How the scheduler is set up."""

    policy: str
    max_wait_s: float = 10.0
    seed: int = 0


class Report(NamedTuple):
    """What came of each job, in the order given. ttft_s: time to first token. cached: prompt tokens reused.

    prompt_tokens_computed: in all, those computed again after a retraction too. order: jobs by first admission.
    """

    ttft_s: list[float]
    cached: list[int]
    prompt_tokens_computed: int
    retracted: int
    end_s: float
    order: list[int]


class Clock:
    """Modelled time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Replay:
    """One run. `cache` and `scheduler` are the real ones."""

    def __init__(self, machine: Machine, setting: Setting) -> None:
        geometry = PageGeometry(machine.page_size, "float8_e4m3fn", (LayerGeometry(1, 1, 0),))
        host_pages = machine.host_tokens // machine.page_size
        self.clock = Clock()
        self.machine = machine
        self.cache = HiCache(
            CacheConfig(device_pages=machine.device_tokens // machine.page_size, host_pages=host_pages),
            geometry,
            make_copier=InstantCopier if host_pages else None,
            host=HostPool(host_pages, geometry.page_bytes) if host_pages else None,
            clock=self.clock,
        )
        limits = Limits(machine.max_running, machine.prefill_tokens, machine.shared_tokens)
        policy = make_policy(setting.policy, self.cache, setting.max_wait_s, self.clock, random.Random(setting.seed))
        self.scheduler = Scheduler(self.cache, policy, limits, self.clock)
        self.prompt_tokens_computed = 0
        self.tokens_computed = 0  # of answers too
        self.scheduling_s = 0.0  # wall time
        self.order: list[int] = []
        self.first_token_s: dict[int, float] = {}
        self.cached: dict[int, int] = {}

    def run(self, jobs: Sequence[Job]) -> Report:
        """Run every job to its end."""
        todo = sorted(range(len(jobs)), key=lambda i: (-jobs[i].arrival_s, -i))
        while todo or not self.scheduler.idle:
            while todo and jobs[todo[-1]].arrival_s <= self.clock.now:
                at = todo.pop()
                self.add(at, jobs[at])
            if not self.step():
                assert todo or self.cache.in_flight, "requests are stuck"
                if not self.cache.in_flight:
                    self.clock.now = jobs[todo[-1]].arrival_s
        return Report(
            ttft_s=[self.first_token_s[i] - job.arrival_s for i, job in enumerate(jobs)],
            cached=[self.cached[i] for i in range(len(jobs))],
            prompt_tokens_computed=self.prompt_tokens_computed,
            retracted=self.scheduler.retracted,
            end_s=self.clock.now,
            order=self.order,
        )

    def add(self, serial: int, job: Job) -> Request:
        """Queue a job."""
        ids: list[int] = []  # the scheduler reads a lease's tokens, not the message's
        sampling = SamplingParams(max_new_tokens=job.output_tokens, temperature=0)
        message = GenerateRequest(str(serial), ids, sampling, priority=job.priority, routing_key=job.routing_key)
        request = Request(
            message=message,
            lease=self.cache.open(job.tokens, Namespace("replay", cache_salt=job.salt)),
            limit=len(job.tokens) + job.output_tokens,
            serial=serial,
            sampling_state=SamplingState(sampling, ids, (), ANSWER),
        )
        self.scheduler.add(request)
        return request

    def step(self) -> bool:
        """Compute one step, if there is something to compute."""
        self.cache.poll()
        started = time.perf_counter()
        step = self.scheduler.schedule()
        self.scheduling_s += time.perf_counter() - started
        if step is None:
            return False
        self.clock.now += self.machine.costs.of(step)
        for request, chunk in zip(step.requests, step.batch.chunks, strict=True):
            if request.serial not in self.cached:
                self.cached[request.serial] = request.lease.cached
                self.order.append(request.serial)
            self.tokens_computed += len(chunk.tokens)
            self.prompt_tokens_computed += max(0, min(chunk.end, request.lease.prompt_tokens) - chunk.start)
        started = time.perf_counter()
        rows = self.scheduler.computed(step)
        self.scheduling_s += time.perf_counter() - started
        for row in rows:
            self._advance(step.requests[row])
        return True

    def _advance(self, request: Request) -> None:
        request.lease.append(ANSWER + request.serial)
        request.generated += 1
        self.first_token_s.setdefault(request.serial, self.clock.now)
        if request.num_tokens >= request.limit:
            self.scheduler.remove(request)
