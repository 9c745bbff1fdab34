"""Things by kind and time of last use, in dense columns: what `hicache.adaptive` ranks and `hicache.learner` counts."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

__all__ = ["OCTAVES", "STEPS", "Ages", "Columns", "cell_of", "octaves_of"]

T = TypeVar("T")

STEPS = 2
"""Cells an octave of age."""

OCTAVES = 44
"""Cells of age: cell k is from 2^(k / STEPS) - 1 to 2^((k + 1) / STEPS) - 1 seconds; the last has no end."""

_A_SECOND = STEPS / math.log(2)


def octaves_of(ages_us: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Ages as a number of cells: the whole part is the cell, the rest how far through it."""
    out: npt.NDArray[np.float64] = np.log1p(ages_us * 1e-6)
    out *= _A_SECOND
    return np.minimum(out, OCTAVES - 0.001, out=out)


def cell_of(age_us: int) -> int:
    """The cell of one age."""
    return min(int(math.log1p(age_us * 1e-6) * _A_SECOND), OCTAVES - 1)


class Columns(NamedTuple):
    """Views of all rows: since_us int64, code int64. To be dropped before the next `put` or `discard`."""

    since_us: npt.NDArray[np.int64]
    code: npt.NDArray[np.int64]


class Ages(Generic[T]):
    """Items, each hashed by identity and listed at most once, with the time of its last use and a code for its kind."""

    def __init__(self) -> None:
        self._rows: dict[T, int] = {}
        self._items: list[T] = []
        self._since_us = array("q")
        self._code = array("q")

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._rows

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def put(self, item: T, since_us: int, code: int) -> bool:
        """List an item or change it; whether anything is new."""
        row = self._rows.get(item)
        if row is None:
            self._rows[item] = len(self._items)
            self._items.append(item)
            self._since_us.append(since_us)
            self._code.append(code)
            return True
        if self._since_us[row] == since_us and self._code[row] == code:
            return False
        self._since_us[row] = since_us
        self._code[row] = code
        return True

    def discard(self, item: T) -> None:
        """Take an item off the list, if it is on it; the last one moves into its row."""
        row = self._rows.pop(item, None)
        if row is None:
            return
        last, since_us, code = self._items.pop(), self._since_us.pop(), self._code.pop()
        if row < len(self._items):
            self._items[row], self._since_us[row], self._code[row] = last, since_us, code
            self._rows[last] = row

    def columns(self) -> Columns:
        """All rows as they are; see `Columns`."""
        return Columns(np.frombuffer(self._since_us, np.int64), np.frombuffer(self._code, np.int64))

    def at(self, row: int) -> T:
        """The item of a row."""
        return self._items[row]
