"""A request's hold on the cache: which pages it shares, which it owns, and where it stands."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hicache.metrics import TierHits

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicache.back import Back
    from hicache.learner import Visit
    from hicache.radix_tree import Node
    from hicache.transfer.operation import CopyOp, PrefetchOp, ProbeOp

__all__ = ["Lease", "LeaseState", "Prefetch"]

NO_HITS = TierHits()


class LeaseState(enum.Enum):
    """Where a request stands with the cache."""

    WAITING = "waiting"  # holds nothing but perhaps a prefetch
    LOADING = "loading"  # path pinned, load-back in flight
    ACTIVE = "active"  # path pinned, pages usable
    RELEASED = "released"


@dataclass(slots=True)
class Prefetch:
    """Pages on their way from disk for a waiting request, or for one that computes the front of its hit meanwhile.

    keys: of the page before `start_page` and of those that the store has. begun_s: when reading began.
    pinned: the node after which the next pages are attached, or None. quota_pages: what it still holds of the quota.
    attached: pages that landed and are in the tree. open: operations that have not ended. early: batches that landed before
    those in front of them, by the page they begin with, counted from `start_page`: their slots, and how many are good.
    back: what has landed, if pages are read from the last to the first; then `batch` pages at a time, and `planned` are meant
    to be computed. loads: whether what was attached is being loaded back before the lease is admitted.
    """

    deadline_s: float
    start_page: int
    keys: list[bytes] = field(default_factory=list)
    begun_s: float = 0.0
    pinned: Node | None = None
    quota_pages: int = 0
    attached: int = 0
    wanted: int = 0
    broken: bool = False
    probe: ProbeOp | None = None
    open: list[PrefetchOp] = field(default_factory=list)
    early: dict[int, tuple[npt.NDArray[np.int32], int]] = field(default_factory=dict)
    back: Back | None = None
    batch: int = 1
    loads: bool = False
    planned: int = 0

    @property
    def finished(self) -> bool:
        """Whether nothing more will land."""
        return self.probe is None and not self.open


@dataclass(slots=True, eq=False)
class Lease:
    """Made by `HiCache.open`, ended by `HiCache.release`; belongs to the scheduler thread.

    tokens: prompt and generated tokens so far, int32 little-endian. prompt_tokens: how many of them came with the request.
    slots[:num_slots]: device slots, page i holding positions [i * page_size, (i + 1) * page_size); the first `shared` are the
    tree's and pinned through `node`, the others belong to this lease alone.
    group: what kind of request it is, to the eviction policy. counts: how often each page of its prompt was asked for, if
    ghosts are kept. visit: what those remember of it. generated_tokens: how long its answer is so far.
    cached: leading tokens that need no computing, known once ACTIVE. reused: pages of them that it did not compute itself.
    hits: tokens reused, by tier at arrival (first admission only).
    found: pages that were (device, host, disk) when the request arrived.
    to_host: nobody computes with it, so its pages are brought no higher than the host.
    max_cached_tokens: reuse ends there, since the engine wants to compute what follows.
    load: a load-back that has not been settled. ACTIVE with one: it was started early (`HiCache.start`).
    """

    root: Node
    tokens: bytearray
    prompt_tokens: int
    priority: int = 0
    group: int = 0
    counts: npt.NDArray[np.int32] | None = None
    visit: Visit | None = None
    generated_tokens: int = 0
    state: LeaseState = LeaseState.WAITING
    node: Node | None = None
    shared: int = 0
    slots: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(16, np.int32))
    num_slots: int = 0
    cached: int = 0
    reused: int = 0
    hits: TierHits = NO_HITS
    found: tuple[int, int, int] = (0, 0, 0)
    counted: bool = False
    to_host: bool = False
    max_cached_tokens: int = sys.maxsize
    prefetch: Prefetch | None = None
    load: CopyOp | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.tokens) // 4

    @property
    def held_pages(self) -> int:
        """Device slots that are its, shared, own or just being loaded."""
        return self.num_slots + (len(self.load.dst) if self.load is not None and self.state is LeaseState.LOADING else 0)

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens += token.to_bytes(4, "little", signed=True)
        self.generated_tokens += 1

    def add_slots(self, slots: npt.NDArray[np.int32]) -> None:
        """Append device slots to the page list."""
        need = self.num_slots + len(slots)
        if need > len(self.slots):
            grown = np.empty(max(need, 2 * len(self.slots)), np.int32)
            grown[: self.num_slots] = self.slots[: self.num_slots]
            self.slots = grown
        self.slots[self.num_slots : need] = slots
        self.num_slots = need

    def cut_slots(self, keep: int) -> npt.NDArray[np.int32]:
        """Take the slots after the first `keep` off the list and return a copy of them."""
        gone = self.slots[keep : self.num_slots].copy()
        self.num_slots = keep
        return gone
