"""Load or recompute: running estimates of what computing costs and what each tier costs, and the cheapest mix of both.

Prefill of a token at position i costs a + b·i, since attention grows with the position, and a step costs something besides,
while a page costs the same to bring up wherever it stands. So what is brought up is worth most at the back of a hit, and what
is computed costs least at its front: compute from the front while the back is read from its end on, until the two meet (the
idea and the model of Cake, arXiv 2410.03065).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from hicache.policies.costs import RunningCost

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ComputeRates", "Planner", "meeting_tokens"]

LEAST_TOKENS = 32
"""Smaller steps are decodes; what they cost says nothing about a prompt."""
FORGET_COMPUTE, FORGET_MOVES = 0.98, 0.8
"""What is moved is forgotten sooner: a disk or a network changes its speed, a processor does not."""
RETRY_S = 30.0
"""A tier that was slow is tried again after this long: while it isn't used, nothing new is learnt of it."""


class ComputeRates(NamedTuple):
    """Seconds a step, more a token for each position before it, and a token."""

    step_s: float
    position_s: float
    token_s: float


def meeting_tokens(rates: ComputeRates, start: int, tokens: int, ahead_s: float, each_s: float) -> float:
    """How many of the tokens [start, start + tokens) to compute from the front, so that reading the others ends just then.

    ahead_s: how much longer than `each_s` a token reading takes in all (less than 0: how much is computed besides). With
    a' = a + b·start the two sides meet where a'·x + b·x²/2 = ahead + each·(tokens - x). In [0, tokens].
    """
    linear = rates.token_s + rates.position_s * start + each_s
    constant = ahead_s + each_s * tokens
    if constant <= 0 or linear <= 0:
        return 0.0
    # The stable form of the root: right for b = 0 too.
    x = 2 * constant / (linear + math.sqrt(linear * linear + 2 * rates.position_s * constant))
    return min(x, float(tokens))


class Planner:
    """Predicts times and meeting points. Arithmetic only; owned by the scheduler thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._compute = RunningCost(3, FORGET_COMPUTE)  # of steps, positions, tokens
        self._read = RunningCost(2, FORGET_MOVES)  # of calls of the store, pages
        self._load = RunningCost(2, FORGET_MOVES)  # of copies, pages
        self._read_at = self._load_at = 0.0

    def observe_compute(self, chunks: list[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that computed `chunks` of (first position, tokens) in `seconds`."""
        tokens = sum(count for _, count in chunks)
        if tokens >= LEAST_TOKENS:
            self._compute.observe((1.0, sum(_positions(start, count) for start, count in chunks), tokens), seconds)

    def observe_read(self, calls: int, pages: int, seconds: float) -> None:
        """Learn from a read of `pages` pages in `calls` calls that kept the store busy for `seconds`."""
        self._read.observe((calls, pages), seconds)
        self._read_at = self._clock()

    def observe_load(self, pages: int, seconds: float) -> None:
        """Learn from a copy of `pages` pages from host to device that took `seconds`."""
        self._load.observe((1.0, pages), seconds)
        self._load_at = self._clock()

    def compute_s(self, start: int, tokens: int) -> float | None:
        """Seconds to compute positions [start, start + tokens) in one step; None while nothing is known."""
        return self._compute.seconds((1.0, _positions(start, tokens), tokens)) if self._compute.known else None

    def read_s(self, calls: int, pages: int) -> float | None:
        """Seconds to read `pages` pages in `calls` calls; None while nothing is known, or what is known is old."""
        if not self._read.known or self._clock() - self._read_at > RETRY_S:
            return None
        return self._read.seconds((calls, pages))

    def quick_call_pages(self) -> float:
        """How many pages a call of the store must have at least, so that most of it is spent on pages; 0 if not known."""
        call_s, page_s = self._read.rates()
        return call_s / page_s if page_s else 0.0

    def load_s(self, pages: int) -> float | None:
        """Seconds to copy `pages` pages to the device; None while nothing is known, or what is known is old."""
        if not self._load.known or self._clock() - self._load_at > RETRY_S:
            return None
        return self._load.seconds((1.0, pages))

    def load_pays(self, start: int, tokens: int, pages: int) -> bool:
        """Whether copying `pages` host pages beats computing their `tokens` tokens at `start`. Yes, until known better."""
        load, compute = self.load_s(pages), self.compute_s(start, tokens)
        return load is None or compute is None or load <= compute

    def front_tokens(self, start: int, tokens: int, read_s: float | None, steps: float) -> float | None:
        """How many of the tokens [start, start + tokens) to compute while the others are read, all of which takes `read_s`.

        steps: in how many steps they would be computed. None if something is not known.
        """
        if read_s is None or not self._compute.known:
            return None
        rates = ComputeRates(*self._compute.rates())
        return meeting_tokens(rates, start, tokens, -steps * rates.step_s, read_s / tokens)


def _positions(start: int, count: int) -> float:
    """Sum of the positions [start, start + count)."""
    return count * start + count * (count - 1) / 2
