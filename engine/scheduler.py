"""Continuous batching: which requests compute which tokens in the next step.

A step is one packed forward of decodes (one token each) and chunks of prompts. Pages are asked of the cache as needed; when
there are none, the youngest request gives way and comes back later with all it had computed still in the cache.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, NamedTuple

from engine.batch import Batch, Chunk
from engine.request import Phase
from hicache.lease import LeaseState

if TYPE_CHECKING:
    from engine.request import Request
    from engine.schedule_policy import SchedulePolicy
    from hicache.cache import HiCache

__all__ = ["Limits", "Scheduler", "Step"]

RESERVE_TOKENS = 64
"""Tokens that each running request is assumed to grow by when another one asks to be admitted."""
SCORED_TOKENS = 256
"""Most prompt tokens a step at which logits are kept: a row of logits weighs a hundred times a token's activations."""


class Limits(NamedTuple):
    """max_running: sequences at once. prefill_tokens: most prompt tokens a step."""

    max_running: int
    prefill_tokens: int


class Step(NamedTuple):
    """What the next forward computes: requests with the end of their chunk, in the order of the batch's chunks."""

    requests: list[Request]
    batch: Batch


class Scheduler:
    """Owns all requests between arrival and end. One thread, the loop's.

    waiting, loading and running are kept by arrival.
    """

    def __init__(self, cache: HiCache, policy: SchedulePolicy, limits: Limits) -> None:
        self._cache = cache
        self._policy = policy
        self._limits = limits
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.retracted = 0

    # ---- coming and going

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.phase = Phase.WAITING
        insort(self.waiting, request, key=_serial)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free what it held."""
        for queue in (self.waiting, self.loading, self.running):
            if request in queue:
                queue.remove(request)
        request.phase = Phase.FINISHED
        self._cache.release(request.lease)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for anybody."""
        return not (self.waiting or self.loading or self.running)

    # ---- a step

    def schedule(self) -> Step | None:
        """Choose the next step; None if nobody can compute now (all wait for copies, the disk or room)."""
        self._start_loaded()
        chosen: dict[Request, int] = {}
        for request in [request for request in self.running if request.uncomputed == 1]:
            self._grow(request, 1, chosen)
        budget = self._limits.prefill_tokens
        for request in [request for request in self.running if request.uncomputed > 1]:
            budget -= self._prefill(request, budget, chosen)
        self._admit(budget, chosen)
        requests = [request for request in chosen if request.phase is Phase.RUNNING]
        if not requests:
            return None
        return Step(requests, Batch([self._chunk(request, chosen[request]) for request in requests]))

    def computed(self, step: Step) -> list[int]:
        """Note a finished forward: share its full pages. Returns the rows whose requests can be sampled from now."""
        ready = []
        for row, (request, chunk) in enumerate(zip(step.requests, step.batch.chunks, strict=True)):
            request.computed = chunk.end
            self._cache.commit(request.lease, chunk.end)
            if request.uncomputed == 0:
                ready.append(row)
        return ready

    def _chunk(self, request: Request, count: int) -> Chunk:
        start = request.computed
        lease = request.lease
        logits = max(1, start + count - max(start, request.unscored_from))
        return Chunk(request.tokens(start, start + count), start, lease.slots[: lease.num_slots], logits)

    def _start_loaded(self) -> None:
        for request in [request for request in self.loading if request.lease.state is LeaseState.ACTIVE]:
            self.loading.remove(request)
            self._run(request)

    def _run(self, request: Request) -> None:
        request.phase = Phase.RUNNING
        request.computed = request.lease.cached
        insort(self.running, request, key=_serial)

    def _prefill(self, request: Request, budget: int, chosen: dict[Request, int]) -> int:
        """Put as much of a prompt into the step as `budget` allows; returns what it costs. Scored tokens cost more."""
        price = max(1, self._limits.prefill_tokens // SCORED_TOKENS)
        plain = min(budget, request.uncomputed, max(0, request.unscored_from - request.computed))
        scored = min((budget - plain) // price, request.uncomputed - plain)
        if plain + scored == 0 and budget > 0:
            scored = 1
        return min(budget, self._grow(request, plain + scored, chosen) + scored * (price - 1))

    def _grow(self, request: Request, count: int, chosen: dict[Request, int]) -> int:
        """Put a running request's next `count` tokens into the step; returns how many got in.

        Without room it sits the step out if copies in flight will make some; else the youngest gives way.
        """
        while request.phase is Phase.RUNNING and count > 0:
            if self._cache.extend(request.lease, request.computed + count):
                chosen[request] = count
                return count
            if self._cache.room_is_coming:
                return 0
            youngest = self.running[-1]
            self._retract(youngest)
            chosen.pop(youngest, None)
        return 0

    def _retract(self, request: Request) -> None:
        """Send a request back to wait; its full pages stay in the cache."""
        self.retracted += 1
        self.running.remove(request)
        self._cache.suspend(request.lease)
        request.computed = 0
        self.add(request)

    def _admit(self, budget: int, chosen: dict[Request, int]) -> None:
        """Admit waiting requests in the policy's order while there is room. Those that wait for the disk hold up nobody."""
        if not self.waiting:
            return
        reserve = self._reserve_pages()
        for request in list(self._policy.order(self.waiting)):
            if budget <= 0 or len(self.running) + len(self.loading) >= self._limits.max_running:
                return
            lease = request.lease
            if not self._cache.ready(lease) or self._cache.awaits_load(lease):
                continue
            if not self._cache.admit(lease, reserve):
                return
            self.waiting.remove(request)
            reserve += self._cache.geometry.pages(min(RESERVE_TOKENS, request.limit - request.num_tokens))
            if lease.state is LeaseState.LOADING:
                request.phase = Phase.LOADING
                insort(self.loading, request, key=_serial)
            else:
                self._run(request)
                budget -= self._prefill(request, budget, chosen)

    def _reserve_pages(self) -> int:
        """Pages that running requests still need: for what is left of their prompts and some of their answers."""
        pages = self._cache.geometry.pages
        return sum(
            pages(request.num_tokens + min(RESERVE_TOKENS, request.limit - request.num_tokens)) - request.lease.held_pages
            for request in (*self.running, *self.loading)
        )


def _serial(request: Request) -> int:
    return request.serial
