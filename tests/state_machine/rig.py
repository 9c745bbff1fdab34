"""A cache over tiny real pools whose transfers end when the test says so. A page's bytes are a function of its prefix."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hicache.cache import HiCache
from hicache.geometry import LayerGeometry, PageGeometry
from hicache.keys import Namespace
from hicache.lease import Lease, LeaseState
from hicache.pools import DevicePool, HostPool
from hicache.transfer.manual import ManualCopier, ManualStoreWorker
from hicache.transfer.operation import CopyOp, Operation, PrefetchOp, ProbeOp, StoreOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from queue import SimpleQueue

    from hicache.config import CacheConfig
    from storage.base import PageStore

UNFINISHED = 0x55
"""What a page holds that is computed only in part."""


def page_bytes_of(salt: str, prefix: Iterable[int], size: int) -> np.ndarray:
    """The bytes of the page that ends `prefix`: what a model would compute for it."""
    text = f"{salt}:{','.join(map(str, prefix))}".encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=size).digest(), np.uint8)


class Clock:
    """Own time. Each look costs `drift` seconds, so that what waits for a deadline ends."""

    def __init__(self) -> None:
        self.now = 0.0
        self.drift = 0.0

    def __call__(self) -> float:
        self.now += self.drift
        return self.now


class EagerCopier(ManualCopier):
    """A ManualCopier that can be told to complete at once."""

    eager = False

    def submit(self, op: CopyOp) -> None:
        super().submit(op)
        if self.eager:
            self.complete(op)


class EagerStoreWorker(ManualStoreWorker):
    """A ManualStoreWorker that can be told to complete at once."""

    eager = False

    def submit(self, op: Operation) -> None:
        super().submit(op)
        if self.eager:
            self.complete(op)


@dataclass(eq=False, repr=False)
class Client:
    """What a request knows itself: its tokens, how far they are computed, and what it saw at arrival."""

    lease: Lease
    salt: str
    tokens: list[int]
    prompt_tokens: int
    at_arrival: tuple[int, int]
    computed: int = 0
    counted: bool = False

    def __repr__(self) -> str:
        return f"Client({self.tokens}, computed={self.computed}, {self.lease.state})"


@dataclass
class Rig:
    """One life of a cache, from construction to a crash.

    costs: seconds that reading a page seems to take, and that computing a token took once; (0, 0): it has to find out.
    """

    config: CacheConfig
    page_size: int
    store: PageStore | None
    clock: Clock = field(default_factory=Clock)
    costs: tuple[float, float] = (0.0, 0.0)
    ended: list[Operation] = field(default_factory=list)
    reading_s: float = 0.0

    def __post_init__(self) -> None:
        self.geometry = PageGeometry(self.page_size, "float32", (LayerGeometry(1, 1, 1),))
        size = self.geometry.page_bytes
        self.device = DevicePool(self.config.device_pages, size)
        self.host = HostPool(self.config.host_pages, size) if self.config.host_pages else None
        self.copier: EagerCopier | None = None
        self.worker: EagerStoreWorker | None = None
        host = self.host

        def make_copier(completions: SimpleQueue[Operation]) -> EagerCopier:
            assert host is not None
            self.copier = EagerCopier(self.device, host, completions)
            return self.copier

        def make_worker(store: PageStore, host: HostPool, completions: SimpleQueue[Operation]) -> EagerStoreWorker:
            self.worker = EagerStoreWorker(store, host, completions)
            return self.worker

        self.cache = HiCache(
            self.config,
            self.geometry,
            make_copier=make_copier if host is not None else None,
            host=host,
            store=self.store,
            secret=b"rig",
            clock=self.clock,
            make_worker=make_worker,
        )
        self.salts: dict[bytes, str] = {}
        if self.costs[1]:
            self.cache.observe_compute([(0, 100)], 100 * self.costs[1])
            self.cache._t.planner.observe_read(10, 10, 10 * self.costs[0])

    # ---- a request

    def open(self, tokens: list[int], salt: str = "", priority: int = 0) -> Client:
        """Open a lease, noting how long a hit in memory it found."""
        namespace = Namespace("m", cache_salt=salt)
        root = self.cache._t.chain.root(namespace)
        self.salts[root] = salt
        limit = (len(tokens) - 1) // self.page_size
        there = self.resident().get(salt, {})
        runs = [there.get(tuple(tokens[: (i + 1) * self.page_size])) for i in range(max(0, limit))]
        reachable = runs.index(None) if None in runs else len(runs)
        device = sum(run == "device" for run in runs[:reachable])
        lease = self.cache.open(np.array(tokens, np.int32), namespace, priority)
        return Client(lease, salt, list(tokens), len(tokens), (device, reachable - device))

    def compute(self, client: Client, count: int) -> bool:
        """Extend by `count` tokens, write what a model would, and commit; False if there was no room.

        Fewer tokens, or none, if more of the hit is coming from disk.
        """
        lease, size = client.lease, self.page_size
        limit = self.cache.meet(lease, client.computed)
        if lease.state is LeaseState.LOADING:
            return True
        client.computed = max(client.computed, lease.cached)
        end = min(client.computed + count, limit, len(client.tokens))
        if not self.cache.extend(lease, end):
            return False
        for page in range(client.computed // size, self.geometry.pages(end)):
            assert page >= lease.shared, "a shared page would be written"
            slot = int(lease.slots[page])
            full = (page + 1) * size <= end
            self.device.data.numpy()[slot] = (
                self.bytes_of(client.salt, client.tokens[: (page + 1) * size]) if full else UNFINISHED
            )
        client.computed = end
        self.cache.commit(lease, end)
        self.check_lease(client)
        return True

    def check_lease(self, client: Client) -> None:
        """Every full page below what is computed holds the right bytes, and shared ones are the tree's."""
        lease, size, data = client.lease, self.page_size, self.device.data.numpy()
        assert lease.state is LeaseState.ACTIVE
        for page in range(client.computed // size):
            want = self.bytes_of(client.salt, client.tokens[: (page + 1) * size])
            assert (data[int(lease.slots[page])] == want).all(), f"page {page} of a lease holds wrong bytes"

    def bytes_of(self, salt: str, prefix: Iterable[int]) -> np.ndarray:
        """What the page that ends `prefix` must hold."""
        return page_bytes_of(salt, prefix, self.geometry.page_bytes)

    # ---- operations

    @property
    def pending(self) -> list[Operation]:
        """Operations that have not ended."""
        copies = self.copier.pending if self.copier is not None else []
        accesses = self.worker.pending if self.worker is not None else []
        return [*copies, *accesses]

    @property
    def unsettled(self) -> list[Operation]:
        """Operations that the cache still counts as in flight."""
        return [*self.pending, *self.ended]

    def end(self, op: Operation, how: Callable[[ManualCopier | ManualStoreWorker], Callable[[Operation], None]]) -> None:
        """End one pending operation: `how` picks complete or fail."""
        side = self.copier if isinstance(op, CopyOp) else self.worker
        assert side is not None
        how(side)(op)
        if isinstance(op, PrefetchOp):
            self.reading_s += self.costs[0] * len(op.refs)
            op.ended_s += self.reading_s
        self.ended.append(op)

    def complete(self, op: Operation) -> None:
        """Complete one."""
        self.end(op, lambda side: side.complete)

    def fail(self, op: Operation) -> None:
        """Fail one."""
        self.end(op, lambda side: side.fail)

    def poll(self) -> None:
        """Let the cache settle what has ended."""
        self.ended.clear()
        self.cache.poll()

    def settle(self) -> None:
        """Complete everything, and what follows from it."""
        self.poll()
        for _ in range(1000):
            if not self.pending:
                break
            for op in self.pending:
                self.complete(op)
            self.poll()
        assert self.cache.in_flight == 0

    def set_eager(self, *, eager: bool) -> None:
        """Whether operations complete as soon as they are submitted."""
        for side in (self.copier, self.worker):
            if side is not None:
                side.eager = eager

    # ---- what is where

    def resident(self) -> dict[str, dict[tuple[int, ...], str]]:
        """By salt, the prefixes that have a page in memory, and the highest tier that has it."""
        out: dict[str, dict[tuple[int, ...], str]] = {}
        for root in self.cache._t.tree.roots.values():
            pages = out.setdefault(self.salts[root.hashes], {})
            stack = [(child, ()) for child in root.child_list()]
            while stack:
                node, above = stack.pop()
                tokens = above + tuple(np.frombuffer(bytes(node.key), np.int32).tolist())
                for i in range(len(node.pages)):
                    end = len(above) + (i + 1) * self.page_size
                    pages[tokens[:end]] = "device" if i < node.device_len else "host"
                stack += [(child, tokens) for child in node.child_list()]
        return out


__all__ = ["UNFINISHED", "Client", "Clock", "PrefetchOp", "ProbeOp", "Rig", "StoreOp", "page_bytes_of"]
