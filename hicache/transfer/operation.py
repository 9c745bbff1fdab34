"""Operations: every copy and every store access is one, and each ends exactly once: done, failed or cancelled.

The owner (scheduler thread) makes an operation, marks its pages busy and submits it. A worker runs it and posts it to the
completion queue; the owner drains the queue at every step and runs `on_end` there. Workers never touch tree or table.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from storage.base import GetOutcome, NamespaceInfo, PageRef, PutOutcome

    Ints = npt.NDArray[np.int32]

__all__ = ["Copier", "CopyOp", "LayerGate", "OpKind", "OpState", "Operation", "PrefetchOp", "ProbeOp", "StoreOp", "StoreRunner"]


class OpKind(enum.StrEnum):
    """What an operation moves."""

    BACKUP = "backup"  # device → host
    LOAD_BACK = "load_back"  # host → device
    PROBE = "probe"  # asks the store how long a hit is
    PREFETCH = "prefetch"  # disk → host
    STORE = "store"  # host → disk


class OpState(enum.StrEnum):
    """Where an operation is. The last three are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """Common part. `cancelled` is a request to stop early, set by the owner and read by the worker between pages.

    error: what went wrong, and error_kind its short stable name; set when the state is FAILED.
    """

    kind: OpKind
    on_end: Callable[[Operation], None]
    state: OpState = OpState.PENDING
    cancelled: bool = False
    error: str = ""
    error_kind: str = ""
    started_s: float = field(default_factory=time.perf_counter)
    ended_s: float = 0.0

    def end(self, state: OpState) -> None:
        """Settle the outcome; only the worker that runs it calls this, once."""
        assert self.state is OpState.PENDING, "an operation ended twice"
        self.ended_s = time.perf_counter()
        self.state = state

    def fail(self, error: BaseException) -> None:
        """End as failed, remembering why."""
        self.error = f"{type(error).__name__}: {error}"
        self.error_kind = getattr(error, "kind", type(error).__name__)
        self.end(OpState.FAILED)


class LayerGate(Protocol):
    """What lets compute start on pages that are still being loaded back: each layer waits for its own part of them."""

    def wait(self, layer: int) -> None:
        """Order what is submitted to the caller's current stream from now on after this layer's part of the pages.

        layer: an index into the geometry's layers. Returns at once: the stream waits, the thread does not. Can't be captured
        into a CUDA graph.
        """
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class CopyOp(Operation):
    """Copies pages between device and host pool: page i goes from src[i] to dst[i], slots of the pools its kind names.

    `ids` are the logical pages, for the owner. The copier may read `src` and write `dst` until the operation has ended.
    gate: set by a copier whose copies are ordered by streams, when all of a load-back has been issued; never by others, nor if
    issuing it failed. From then on `dst` may be read by compute that has passed the gate, though the operation has not ended.
    """

    ids: Ints
    src: Ints
    dst: Ints
    gate: LayerGate | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class StoreOp(Operation):
    """Writes host pages of one namespace to the store, parents first. `outcomes` is filled when done."""

    ids: Ints
    slots: Ints
    refs: Sequence[PageRef]
    namespace: NamespaceInfo
    outcomes: list[PutOutcome] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefetchOp(Operation):
    """Reads pages from the store into host slots that the operation owns. `outcomes` is filled when done, one a page."""

    slots: Ints
    refs: Sequence[PageRef]
    outcomes: list[GetOutcome] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class ProbeOp(Operation):
    """Asks how many of `keys`, from the first on, the store has. `found` is filled when done."""

    keys: Sequence[bytes]
    found: int = 0


class Copier(Protocol):
    """Runs CopyOps of one pair of pools. Each submitted operation is posted to the completion queue exactly once.

    Order: a backup reads what the compute submitted before it wrote; compute submitted after a completed load-back reads what
    it wrote. Operations of one kind start in order; they may end in any order.
    """

    def submit(self, op: CopyOp) -> None:
        """Start a copy; returns at once. Owner thread."""
        ...

    def close(self) -> None:
        """Finish what was submitted and release threads or streams. Idempotent."""
        ...


class StoreRunner(Protocol):
    """Runs StoreOps, PrefetchOps and ProbeOps of one store and host pool. Each is posted to the completion queue exactly once.

    It may read or write an operation's host slots until the operation has ended.
    """

    def submit(self, op: Operation) -> None:
        """Start an operation; returns at once. Owner thread."""
        ...

    def close(self) -> bool:
        """Finish what was submitted; False if something hangs. The store stays open. Idempotent."""
        ...
