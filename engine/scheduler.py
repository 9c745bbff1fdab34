"""Continuous batching: which requests compute which tokens in the next step.

A step is one packed forward of decodes (one token each) and chunks of prompts. Pages are asked of the cache as needed; when
there are none, the youngest request gives way and comes back later with all it had computed still in the cache.

A waiting request is in one of three places: with the policy, which says who goes next; with a pioneer that is computing the
same prefix (`engine.schedule.sharing`); or aside, until its pages have come from disk or its turn to be asked again has come.
"""

from __future__ import annotations

import contextlib
import time
from bisect import insort
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from engine.batch import Batch, Chunk
from engine.request import Phase
from engine.schedule.sharing import Sharing
from hicache.lease import LeaseState

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.request import Request
    from engine.schedule.base import SchedulePolicy
    from hicache.cache import HiCache

__all__ = ["Limits", "Scheduler", "Step"]

RESERVE_TOKENS = 64
"""Tokens that each running request is assumed to grow by when another one asks to be admitted."""
SCORED_TOKENS = 256
"""Most prompt tokens a step at which logits are kept: a row of logits weighs a hundred times a token's activations."""


ASKED = 256
"""Waiting requests looked at in a step, at most: of those aside, and of those the policy names."""


class Limits(NamedTuple):
    """max_running: sequences at once. prefill_tokens: most prompt tokens a step.

    shared_tokens: a request waits for a prefix that another one is computing if that spares it at least so many tokens.
    """

    max_running: int
    prefill_tokens: int
    shared_tokens: int = 32


class Step(NamedTuple):
    """What the next forward computes: requests with the end of their chunk, in the order of the batch's chunks."""

    requests: list[Request]
    batch: Batch


class Scheduler:
    """Owns all requests between arrival and end. One thread, the loop's. loading and running are kept by arrival."""

    def __init__(
        self, cache: HiCache, policy: SchedulePolicy, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._policy = policy
        self._limits = limits
        self._clock = clock
        self._sharing = Sharing(cache.geometry.page_size, limits.shared_tokens)
        self._aside: deque[Request] = deque()
        self.waiting: dict[Request, None] = {}
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.retracted = 0

    # ---- coming and going

    def add(self, request: Request) -> None:
        """Queue a request that has just arrived."""
        request.arrived_s = self._clock()
        self._wait(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free what it held."""
        if request.phase is Phase.WAITING:
            self._leave_queue(request)
            with contextlib.suppress(ValueError):
                self._aside.remove(request)
        for queue in (self.loading, self.running):
            if request in queue:
                queue.remove(request)
        self._ask_again(self._sharing.end(request))
        request.phase = Phase.FINISHED
        self._cache.release(request.lease)

    def _wait(self, request: Request) -> None:
        request.phase = Phase.WAITING
        self.waiting[request] = None
        self._aside.append(request)

    def _leave_queue(self, request: Request) -> None:
        del self.waiting[request]
        self._policy.discard(request)
        self._sharing.forget(request)

    def _ask_again(self, requests: list[Request]) -> None:
        """Let followers be asked before those that have just come."""
        self._aside.extendleft(reversed(requests))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for anybody."""
        return not (self.waiting or self.loading or self.running)

    # ---- a step

    def schedule(self) -> Step | None:
        """Choose the next step; None if nobody can compute now (all wait for copies, the disk or room)."""
        self._start_loaded()
        self._look_aside()
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
        gates = [request.gate for request in requests if request.gate is not None]
        for request in requests:
            request.gate = None  # later steps come after this one on the device's stream
        return Step(requests, Batch([self._chunk(request, chosen[request]) for request in requests], gates=gates))

    def computed(self, step: Step) -> list[int]:
        """Note a finished forward: share its full pages. Returns the rows whose requests can be sampled from now."""
        ready = []
        for row, (request, chunk) in enumerate(zip(step.requests, step.batch.chunks, strict=True)):
            request.computed = chunk.end
            shared = request.lease.shared
            self._cache.commit(request.lease, chunk.end)
            if self.waiting and request.lease.shared > shared:
                self._landed(request)
            if request.uncomputed == 0:
                ready.append(row)
                if self._sharing.pioneers:
                    self._ask_again(self._sharing.end(request))
        return ready

    def _landed(self, request: Request) -> None:
        """Tell those who wait for it that a request's shared pages are in memory."""
        self._policy.landed(request)
        self._ask_again(self._sharing.progressed(request))

    def _chunk(self, request: Request, count: int) -> Chunk:
        start = request.computed
        lease = request.lease
        logits = max(1, start + count - max(start, request.unscored_from))
        return Chunk(request.tokens(start, start + count), start, lease.slots[: lease.num_slots], logits)

    def _start_loaded(self) -> None:
        for request in [request for request in self.loading if request.lease.state is LeaseState.ACTIVE]:
            self.loading.remove(request)
            self._run(request)
        if self.loading and not self.running:
            self._start_early(self.loading[0])

    def _start_early(self, request: Request) -> None:
        """Let a request compute while its pages come. Only when nothing else runs: a step waits for the slowest of its rows."""
        request.gate = self._cache.start(request.lease)
        if request.gate is not None:
            self.loading.remove(request)
            self._run(request)

    def _look_aside(self) -> None:
        """Give the policy those that could be admitted by now."""
        for _ in range(min(ASKED, len(self._aside))):
            request = self._aside.popleft()
            if self._cache.ready(request.lease):
                self._policy.add(request)
            else:
                self._aside.append(request)

    def _run(self, request: Request) -> None:
        request.phase = Phase.RUNNING
        request.computed = request.lease.cached
        insort(self.running, request, key=_serial)
        if self.waiting:
            self._landed(request)

    def _prefill(self, request: Request, budget: int, chosen: dict[Request, int]) -> int:
        """Put as much of a prompt into the step as `budget` allows; returns what it costs. Scored tokens cost more."""
        most = self._meet(request)
        if most < 1:
            return 0
        price = max(1, self._limits.prefill_tokens // SCORED_TOKENS)
        plain = min(budget, most, max(0, request.unscored_from - request.computed))
        scored = min((budget - plain) // price, most - plain)
        if plain + scored == 0 and budget > 0:
            scored = 1
        return min(budget, self._grow(request, plain + scored, chosen) + scored * (price - 1))

    def _meet(self, request: Request) -> int:
        """How many of its uncomputed tokens a running request may compute now; it may have to load pages first."""
        lease = request.lease
        end = self._cache.meet(lease, request.computed)
        if lease.state is LeaseState.LOADING:
            self.running.remove(request)
            request.phase = Phase.LOADING
            insort(self.loading, request, key=_serial)
            return 0
        request.computed = max(request.computed, lease.cached)
        return min(end, lease.num_tokens) - request.computed

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
        self._ask_again(self._sharing.end(request))
        self._cache.suspend(request.lease)
        request.gate = None
        request.computed = 0
        self._wait(request)

    def _admit(self, budget: int, chosen: dict[Request, int]) -> None:
        """Admit waiting requests in the policy's order while there is room. Those that wait for pages hold up nobody."""
        if not self.waiting:
            return
        reserve = self._reserve_pages()
        for _ in range(ASKED):
            request = self._policy.first(self.running)  # asked at every step, so that ranks are kept up to date
            if request is None or budget <= 0 or len(self.running) + len(self.loading) >= self._limits.max_running:
                return
            if self._awaits_pages(request):
                self._policy.discard(request)
                continue
            if not self._cache.admit(request.lease, reserve):
                return
            reserve += self._cache.geometry.pages(min(RESERVE_TOKENS, request.limit - request.num_tokens))
            budget -= self._start(request, budget, chosen)

    def _awaits_pages(self, request: Request) -> bool:
        """Whether pages that a waiting request needs are on their way; it is asked again when they are there."""
        cache, lease = self._cache, request.lease
        if self._sharing.pioneers and self._sharing.follow(request, cache.cached_pages(lease)):
            return True
        if not cache.in_flight or not cache.awaits_load(lease):
            return False
        if not self._sharing.follow_load(request):
            self._aside.append(request)
        return True

    def _start(self, request: Request, budget: int, chosen: dict[Request, int]) -> int:
        """Let an admitted request load or compute; returns what that costs of the step's budget."""
        self._policy.take(request)
        del self.waiting[request]
        if self._cache.config.reuse:
            self._sharing.begin(request)
        if request.lease.state is LeaseState.LOADING:
            request.phase = Phase.LOADING
            insort(self.loading, request, key=_serial)
            return 0
        self._run(request)
        return self._prefill(request, budget, chosen)

    def _reserve_pages(self) -> int:
        """Pages that running requests still need: for what is left of their prompts and some of their answers."""
        pages = self._cache.geometry.pages
        return sum(
            pages(request.num_tokens + min(RESERVE_TOKENS, request.limit - request.num_tokens)) - request.lease.held_pages
            for request in (*self.running, *self.loading)
        )


def _serial(request: Request) -> int:
    return request.serial
