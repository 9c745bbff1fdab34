"""Load or recompute: running estimates of what computing costs and what reading from disk costs.

Prefill of a token at position i costs a + b·i, since attention grows with the position, while reading a page costs a constant
(the model of Cake, arXiv 2410.03065). a and b are fitted to the steps that were run, by least squares that forget slowly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Planner"]

FORGET = 0.98
"""Weight of what was known when a new step is added."""
LEAST_TOKENS = 32
"""Smaller steps say more about the cost of a step than of a token."""
NEWEST = 0.3
"""Weight of the newest read in the running mean."""
RETRY_S = 30.0
"""A store that was slow is tried again after this long."""


class Planner:
    """Predicts compute and read times. Arithmetic only; owned by the scheduler thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._n = self._np = self._pp = self._nt = self._pt = 0.0  # sums of products of tokens, positions and seconds
        self._page_s: float | None = None
        self._read_at = 0.0

    def observe_compute(self, chunks: list[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that computed `chunks` of (first position, tokens) in `seconds`."""
        tokens = float(sum(count for _, count in chunks))
        if tokens < LEAST_TOKENS:
            return
        positions = sum(_positions(start, count) for start, count in chunks)
        weight = 1 / (tokens * tokens)  # errors count by their share, so long steps do not drown short ones
        self._n = FORGET * self._n + weight * tokens * tokens
        self._np = FORGET * self._np + weight * tokens * positions
        self._pp = FORGET * self._pp + weight * positions * positions
        self._nt = FORGET * self._nt + weight * tokens * seconds
        self._pt = FORGET * self._pt + weight * positions * seconds

    def observe_read(self, pages: int, seconds: float) -> None:
        """Learn from a read of `pages` pages that kept the store busy for `seconds`."""
        each = seconds / pages
        self._page_s = each if self._page_s is None else (1 - NEWEST) * self._page_s + NEWEST * each
        self._read_at = self._clock()

    def compute_s(self, start: int, tokens: int) -> float | None:
        """Seconds to compute positions [start, start + tokens); None while nothing is known."""
        if not self._n:
            return None
        a, b = self._fit()
        return a * tokens + b * _positions(start, tokens)

    def read_s(self, pages: int) -> float | None:
        """Seconds to read `pages` pages; None while nothing is known, or what is known is old."""
        if self._page_s is None or self._clock() - self._read_at > RETRY_S:
            return None
        return self._page_s * pages

    def pays(self, start: int, tokens: int, pages: int) -> bool:
        """Whether reading `pages` pages beats computing their `tokens` tokens at `start`. Yes, until known better."""
        read, compute = self.read_s(pages), self.compute_s(start, tokens)
        return read is None or compute is None or read <= compute

    def _fit(self) -> tuple[float, float]:
        """Seconds a token, and more a position; both at least 0."""
        determinant = self._n * self._pp - self._np * self._np
        if determinant > 1e-9 * self._n * self._pp:
            a = (self._nt * self._pp - self._pt * self._np) / determinant
            b = (self._n * self._pt - self._np * self._nt) / determinant
            if a >= 0 and b >= 0:
                return a, b
        return self._nt / self._n, 0.0


def _positions(start: int, count: int) -> float:
    """Sum of the positions [start, start + count)."""
    return count * start + count * (count - 1) / 2
