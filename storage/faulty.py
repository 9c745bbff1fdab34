"""A store that misbehaves on purpose, by plan: for tests, and for game days on a running server.

Calls that fail, raise, crawl or hang are made to by the wrapper; flipped bits and short reads are put in between the store's
medium and its verification (see `Medium`), so that what is tried is the store's own checking.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from storage.base import GetOutcome, PutOutcome
from storage.errors import StoreError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from storage.base import NamespaceInfo, PageRecord, PageRef, PageStore, StoreStats

__all__ = ["Fault", "FaultKind", "FaultPlan", "FaultyMedium", "FaultyStore"]

_T = TypeVar("_T")
FaultKind = Literal["fail", "raise", "slow", "hang", "short", "flip"]
_MEDIUM_KINDS = ("short", "flip")
_METHODS = ("any", "count_prefix", "put_many", "get_many", "delete", "clear", "sync", "stats")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, at the `at`-th call (from 1) and, with `every`, each `every` calls after that.

    kind: fail (outcome FAILED for all; StoreError where there are no outcomes), raise (StoreError), slow (`seconds` late, and
    `page_seconds` more for each page that is put or got), hang (`seconds`, then StoreUnavailable), short and flip (of page
    reads: `at` counts pages, `method` is ignored).
    """

    kind: FaultKind
    at: int = 1
    every: int = 0
    method: str = "any"
    seconds: float = 0.0
    page_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"a fault's kind must be one of {', '.join(get_args(FaultKind))}, not {self.kind}")
        if self.method not in _METHODS:
            raise ValueError(f"a fault's method must be one of {', '.join(_METHODS)}, not {self.method}")
        if self.at < 1 or min(self.every, self.seconds, self.page_seconds) < 0:
            raise ValueError("a fault needs at >= 1, and nothing in it may be less than 0")

    def strikes(self, call: int) -> bool:
        """Tell whether it hits the `call`-th call."""
        return call == self.at or (self.every > 0 and call > self.at and (call - self.at) % self.every == 0)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All that shall go wrong. The seed picks the bits that flip and the lengths of short reads."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> FaultPlan:
        """Read `{"seed": 1, "faults": [{"kind": "flip", "at": 3, "every": 10}, ...]}`. Raises ValueError."""
        faults, seed = config.get("faults", []), config.get("seed", 0)
        if set(config) - {"faults", "seed"} or not isinstance(faults, list) or not isinstance(seed, int):
            raise ValueError('a fault plan is {"seed": integer, "faults": [list of faults]}')
        try:
            return cls(tuple(Fault(**fault) for fault in faults), seed)
        except TypeError as error:
            raise ValueError(f"a fault has the fields kind, at, every, method, seconds, page_seconds: {error}") from error


class FaultyMedium:
    """Flips bits and cuts reads short, by plan. Any thread."""

    def __init__(self, plan: FaultPlan) -> None:
        self._faults = [fault for fault in plan.faults if fault.kind in _MEDIUM_KINDS]
        self._random = random.Random(plan.seed)
        self._lock = threading.Lock()
        self._reads = 0
        self.injected: Counter[str] = Counter()

    def after_read(self, payload: memoryview, got_bytes: int) -> int:
        with self._lock:
            self._reads += 1
            for fault in self._faults:
                if not fault.strikes(self._reads):
                    continue
                self.injected[fault.kind] += 1
                at = self._random.randrange(payload.nbytes)
                payload[at] ^= 1 << self._random.randrange(8)
                got_bytes = got_bytes - payload.nbytes + at if fault.kind == "short" else got_bytes
        return got_bytes


class FaultyStore:
    """A store whose calls go wrong by plan. Closing is never faulty, and ends calls that hang."""

    def __init__(self, inner: PageStore, plan: FaultPlan, medium: FaultyMedium) -> None:
        self._inner = inner
        self._medium = medium
        self._faults = [fault for fault in plan.faults if fault.kind not in _MEDIUM_KINDS]
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._injected: Counter[str] = Counter()
        self._closing = threading.Event()

    @property
    def injected(self) -> Mapping[str, int]:
        """Faults injected so far, by kind."""
        return self._injected + self._medium.injected

    @property
    def secret(self) -> bytes:
        return self._inner.secret

    def register_namespace(self, info: NamespaceInfo) -> None:
        self._inner.register_namespace(info)

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        return self._call("count_prefix", lambda: self._inner.count_prefix(keys), None)

    def put_many(self, records: Sequence[PageRecord]) -> list[PutOutcome]:
        failed = [PutOutcome.FAILED] * len(records)
        return self._call("put_many", lambda: self._inner.put_many(records), failed, len(records))

    def get_many(self, refs: Sequence[PageRef], into: Sequence[memoryview]) -> list[GetOutcome]:
        failed = [GetOutcome.FAILED] * len(refs)
        return self._call("get_many", lambda: self._inner.get_many(refs, into), failed, len(refs))

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._call("delete", lambda: self._inner.delete(keys), None)

    def clear(self, namespace: bytes | None = None) -> int:
        return self._call("clear", lambda: self._inner.clear(namespace), None)

    def sync(self) -> None:
        return self._call("sync", self._inner.sync, None)

    def stats(self) -> StoreStats:
        return self._call("stats", self._inner.stats, None)

    def close(self) -> None:
        self._closing.set()
        self._inner.close()

    # helpers

    def _call(self, method: str, do: Callable[[], _T], failed: _T | None, pages: int = 0) -> _T:
        for fault in self._striking(method):
            if fault.kind in ("slow", "hang"):
                self._closing.wait(fault.seconds + fault.page_seconds * pages)
            if fault.kind == "hang":
                raise StoreUnavailable(f"injected: {method} hung for {fault.seconds} s")
            if fault.kind == "raise" or (fault.kind == "fail" and failed is None):
                raise StoreError(f"injected: {method} failed")
            if fault.kind == "fail":
                assert failed is not None
                return failed
        return do()

    def _striking(self, method: str) -> list[Fault]:
        """Count the call under its own name and under "any", and find what hits it."""
        with self._lock:
            self._calls.update((method, "any"))
            striking = [fault for fault in self._faults if fault.method in (method, "any")]
            striking = [fault for fault in striking if fault.strikes(self._calls[fault.method])]
            self._injected.update(fault.kind for fault in striking)
        return striking
