"""Running estimates of what things cost: seconds as a sum of shares, each so much a unit, fitted to what was measured."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RunningCost"]

CONDITION = 1e-5
"""Measurements that differ less than this, by the determinant of their normalised products, don't tell shares apart."""


class RunningCost:
    """Predicts seconds = sum of rate[i] * units[i], no rate below 0, by least squares that forget slowly.

    The last unit is the size of what is measured. Errors count relative to it, so that long measurements do not drown short
    ones. Shares that the measurements can't tell apart, or that would come out negative, are left out: of the ways to leave
    as few as possible out, the one with the least error is taken. The last share is always there.
    """

    def __init__(self, shares: int, forget: float) -> None:
        """Make an estimate of nothing. forget: weight of what was known when a new measurement is added."""
        self._forget = forget
        self._products = np.zeros((shares, shares))
        self._sums = np.zeros(shares)
        self._square = 0.0
        self._rates: np.ndarray | None = None
        self.known = False

    def observe(self, units: Sequence[float], seconds: float) -> None:
        """Add a measurement; the last unit must be above 0."""
        row = np.asarray(units, float)
        weight = 1 / (row[-1] * row[-1])
        self._products = self._forget * self._products + weight * np.outer(row, row)
        self._sums = self._forget * self._sums + weight * seconds * row
        self._square = self._forget * self._square + weight * seconds * seconds
        self._rates = None
        self.known = True

    def rates(self) -> list[float]:
        """Seconds a unit of each share; all 0 while nothing is known."""
        if self._rates is None:
            self._rates = self._fit()
        return list(map(float, self._rates))

    def seconds(self, units: Sequence[float]) -> float:
        """What so many units would cost."""
        return sum(rate * unit for rate, unit in zip(self.rates(), units, strict=True))

    def _fit(self) -> np.ndarray:
        rates = np.zeros(len(self._sums))
        last = len(rates) - 1
        for others in range(last, -1, -1) if self.known else ():
            sets = [[*chosen, last] for chosen in combinations(range(last), others)]
            fits = [fit for chosen in sets if (fit := self._fit_of(chosen)) is not None]
            if fits:
                return min(fits, key=self._error)
        return rates

    def _fit_of(self, chosen: list[int]) -> np.ndarray | None:
        """Rates of the chosen shares, the others 0; None if that can't be told or some are negative."""
        products, sums = self._products[np.ix_(chosen, chosen)], self._sums[chosen]
        scale = 1 / np.sqrt(np.maximum(np.diag(products), np.finfo(float).tiny))
        normal = products * np.outer(scale, scale)
        if len(chosen) > 1 and np.linalg.det(normal) < CONDITION:
            return None
        found = np.linalg.solve(normal, sums * scale) * scale
        if len(chosen) > 1 and (found < 0).any():
            return None
        rates = np.zeros(len(self._sums))
        rates[chosen] = found
        return rates

    def _error(self, rates: np.ndarray) -> float:
        return float(self._square - 2 * rates @ self._sums + rates @ self._products @ rates)
