"""Brings pages of waiting requests up from disk: asks how long the hit is, reads it in batches, attaches what is good.

A waiting request holds a share of the quota and the slots of batches in flight, no more; both are released on every exit.
Pages that landed are ordinary host pages: a request that is aborted leaves them to the next one.

Where reading takes long, the request does not wait for it: pages are read from the last to the first, while it computes from
the first on, until front and back meet (`hicache.back`). It never waits for the store then, so it loses nothing if that is
slower than was thought. What has landed keeps its host slots until the pages before it are there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hicache.back import Back, Batch
from hicache.landing import Landing
from hicache.lease import Prefetch
from hicache.policies.prefetch import prefetch_deadline_s
from hicache.transfer.operation import OpState
from hicache.transfer.store_worker import PAGES_A_READ, store_calls
from storage.base import GetOutcome, PageRef

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicache.lease import Lease
    from hicache.moves import Mover
    from hicache.radix_tree import Match, Node
    from hicache.reclaim import Reclaimer
    from hicache.tiers import Tiers
    from hicache.transfer.operation import CopyOp, PrefetchOp, ProbeOp

    Slots = npt.NDArray[np.int32]

__all__ = ["Prefetcher", "batches"]

BACK_BATCHES = 32
"""Into so many batches the back of a hit is cut, to meet the front within a few percent; fewer where calls are slow."""
STEP_SHARE = 0.75
"""Share of what is left of the front that the next step computes; the rest is looked at again, with what has landed by then."""
PATIENCE, PATIENCE_SHARE = 2.0, 0.02
"""Under `timeout` a request waits for its pages this many times longer than expected, or this share of what computing takes."""


def batches(pages: int, size: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of `size` pages, the last one of what is left, in which `pages` pages are read, an operation each."""
    for first in range(0, pages, size):
        yield first, min(first + size, pages)


class Prefetcher:
    """Runs the prefetches of all waiting leases. Owned by the scheduler thread."""

    def __init__(self, tiers: Tiers, mover: Mover, reclaimer: Reclaimer) -> None:
        self._t = tiers
        self._mover = mover
        self._reclaimer = reclaimer
        self._landing = Landing(tiers)
        self.quota_pages = int(tiers.config.prefetch.quota * tiers.config.host_pages)
        self.quota_used = 0
        self._batch = max(1, tiers.config.prefetch.batch_bytes // tiers.geometry.page_bytes)
        self._least = max(1, tiers.config.prefetch.overlap_tokens // tiers.geometry.page_size)

    def begin(self, lease: Lease, match: Match, limit_pages: int) -> None:
        """Ask the store for the pages after `match`, up to `limit_pages` of the prompt, if that could be worth it."""
        t, page = self._t, self._t.tree.page_key_bytes
        config = t.config.prefetch
        missing = limit_pages - match.pages
        if t.worker is None or missing < 1 or missing * t.geometry.page_size < config.threshold_tokens:
            return
        parent = t.key_at(match.node, match.depth)
        tokens = bytes(lease.tokens[match.pages * page : limit_pages * page])
        keys = t.chain.extend(parent, tokens)
        deadline_s = t.clock() + prefetch_deadline_s(config, missing * t.geometry.page_size)
        lease.prefetch = prefetch = Prefetch(deadline_s=deadline_s, start_page=match.pages)

        def found(op: ProbeOp) -> None:
            prefetch.probe = None
            enough = op.found * t.geometry.page_size >= max(1, config.threshold_tokens)
            if enough and not prefetch.broken and t.worker is not None:
                prefetch.keys = [parent, *keys[: op.found]]
                self._found(lease, prefetch)

        prefetch.probe = self._mover.probe(keys, found)

    def _found(self, lease: Lease, prefetch: Prefetch) -> None:
        """The store has pages: read them, or compute them, or read the back while the front is computed."""
        t, size, pages = self._t, self._t.geometry.page_size, len(prefetch.keys) - 1
        device, host, _ = lease.found
        lease.found = (device, host, pages)
        if t.config.prefetch.policy != "timeout":
            self._read(lease, prefetch)
            return
        prefetch.batch = self._back_batch(pages)
        front = self._front_pages(prefetch.start_page, pages, self._back_read_s(prefetch, pages)) or 0.0
        if front + prefetch.batch > pages:
            t.metrics.recomputed_tokens.labels("slow_store").inc(pages * size)
        elif front >= self._least:
            self._read_back(lease, prefetch, round(front))
        else:
            prefetch.deadline_s = min(prefetch.deadline_s, t.clock() + self._patience_s(prefetch.start_page, pages))
            self._read(lease, prefetch)

    def _patience_s(self, start_page: int, pages: int) -> float:
        """How long a request may wait for pages that are quicker to read than to compute."""
        t, size = self._t, self._t.geometry.page_size
        compute_s = t.planner.compute_s(start_page * size, pages * size)
        if compute_s is None:
            return math.inf
        return max(PATIENCE * (t.planner.read_s(store_calls(pages), pages) or 0.0), PATIENCE_SHARE * compute_s)

    # ---- the end of a prefetch

    def admitted(self, lease: Lease) -> None:
        """The lease runs from now on: what has not landed goes on from the back, or not at all."""
        prefetch = lease.prefetch
        if prefetch is not None and prefetch.back is None and prefetch.open and self._t.config.prefetch.policy == "timeout":
            prefetch = self._turn(lease, prefetch)
        if prefetch is None or prefetch.back is None or (prefetch.finished and not len(prefetch.back)):
            self.stop(lease)
        else:
            self._unpin(prefetch)

    def _turn(self, lease: Lease, late: Prefetch) -> Prefetch:
        """Pages that were read first to last are late: read what is left from the last to the first."""
        self._abandon(late)
        self._release_quota(late)
        keys = late.keys[late.attached :]
        lease.prefetch = prefetch = Prefetch(
            deadline_s=math.inf, start_page=late.start_page + late.attached, keys=keys, begun_s=late.begun_s
        )
        prefetch.batch = self._back_batch(len(keys) - 1)
        self._read_back(lease, prefetch, len(keys) - 1)
        if prefetch.back is None:  # no room, since what was late still holds its slots
            self._t.metrics.recomputed_tokens.labels("late").inc((len(keys) - 1) * self._t.geometry.page_size)
        return prefetch

    def stop(self, lease: Lease) -> None:
        """Let the lease go on without what has not landed. Idempotent; slots come back as operations end."""
        prefetch, lease.prefetch = lease.prefetch, None
        if prefetch is None:
            return
        if prefetch.open and not prefetch.broken:
            late = prefetch.wanted - prefetch.attached
            self._t.metrics.recomputed_tokens.labels("late").inc(late * self._t.geometry.page_size)
        self._abandon(prefetch)
        if prefetch.back is not None:
            self._t.host.give(prefetch.back.clear())
        self._release_quota(prefetch)

    def _abandon(self, prefetch: Prefetch) -> None:
        prefetch.broken = True
        if prefetch.probe is not None:
            prefetch.probe.cancelled = True
        for op in prefetch.open:
            op.cancelled = True
        for slots, _ in prefetch.early.values():
            self._t.host.give(slots)
        prefetch.early.clear()
        self._unpin(prefetch)

    def _unpin(self, prefetch: Prefetch) -> None:
        if prefetch.pinned is not None:
            self._t.tree.unpin(prefetch.pinned)
            prefetch.pinned = None

    def _release_quota(self, prefetch: Prefetch) -> None:
        self.quota_used -= prefetch.quota_pages
        prefetch.quota_pages = 0

    # ---- from the first page to the last

    def _read(self, lease: Lease, prefetch: Prefetch) -> None:
        """Start reading the pages from the first on, as far as there is room for them."""
        for first, last in batches(self._claim(lease, prefetch), self._batch):
            self._read_batch(lease, prefetch, first, last)

    def _claim(self, lease: Lease, prefetch: Prefetch) -> int:
        """Take quota, and make room on the host, for as many of the pages as possible; returns for how many. Pins what they
        hang below."""
        t, tree = self._t, self._t.tree
        wanted = len(prefetch.keys) - 1
        match = tree.match(lease.root, lease.tokens, prefetch.start_page * tree.page_key_bytes)
        if match.pages < prefetch.start_page:
            return 0  # what the probe followed has been evicted meanwhile
        count = min(wanted, self.quota_pages - self.quota_used)
        if count < 1:
            t.metrics.dropped_pages.labels("prefetch_quota").inc(wanted)
            return 0
        node = match.node if match.depth == len(match.node.pages) else tree.split(match.node, match.depth)
        tree.pin(node)
        count = self._reclaimer.host_room(count)
        if count < 1:
            tree.unpin(node)
            return 0
        prefetch.pinned = node
        prefetch.begun_s = prefetch.begun_s or t.clock()
        prefetch.wanted = prefetch.quota_pages = count
        self.quota_used += count
        return count

    def _refs(self, lease: Lease, prefetch: Prefetch, first: int, last: int) -> list[PageRef]:
        """What the store must know of pages [first, last), counted from where the prefetch begins."""
        keys, page = prefetch.keys, self._t.tree.page_key_bytes
        root, at = lease.root.hashes, prefetch.start_page * page
        return [
            PageRef(keys[i + 1], keys[i], root, bytes(lease.tokens[at + i * page : at + (i + 1) * page]))
            for i in range(first, last)
        ]

    def _read_batch(self, lease: Lease, prefetch: Prefetch, first: int, last: int) -> None:
        t = self._t
        slots = t.host.take(last - first)

        def landed(op: PrefetchOp, good: int) -> None:
            prefetch.open.remove(op)
            if prefetch.broken:
                t.host.give(slots)
                return
            prefetch.early[first] = (slots, good if t.worker is not None else 0)
            while not prefetch.broken and (batch := prefetch.early.pop(prefetch.attached, None)) is not None:
                self._attach(lease, prefetch, *batch)

        prefetch.open.append(self._mover.prefetch(self._refs(lease, prefetch, first, last), slots, landed))

    def _attach(self, lease: Lease, prefetch: Prefetch, slots: Slots, good: int) -> None:
        """Hang the pages in slots[:good], which are the next ones, into the tree."""
        self._t.host.give(slots[good:])
        if good:
            prefetch.pinned = self._hang(lease, prefetch, prefetch.start_page + prefetch.attached, slots[:good])
            prefetch.attached += good
        if good < len(slots) or not (prefetch.open or prefetch.early):
            self._abandon(prefetch)  # nothing after a gap can be attached
        self._load_ahead(lease, prefetch)

    def _load_ahead(self, lease: Lease, prefetch: Prefetch) -> None:
        """Load back what has been attached while the next batch is being read, if no other request needs the device."""
        t, tree = self._t, self._t.tree
        if t.admitted or prefetch.loads or lease.prefetch is not prefetch or lease.to_host:
            return
        match = tree.match(lease.root, lease.tokens, (prefetch.start_page + prefetch.attached) * tree.page_key_bytes)
        node, count = match.node, match.pages - match.device
        if match.depth < len(node.pages) or not count:
            return
        ids = tree.path_ids(node)[match.device :]
        tree.pin(node)  # so that no room is made by what is to be continued
        there = not t.table.loading.take(ids).any() and t.load_pays(match) and self._reclaimer.device_room(count)

        def loaded(op: CopyOp) -> None:
            prefetch.loads = False
            if op.state is OpState.DONE:
                self._load_ahead(lease, prefetch)

        if there:
            prefetch.loads = True
            self._mover.load_back(node, ids, t.device.take(count), loaded)
        tree.unpin(node)

    def _hang(self, lease: Lease, prefetch: Prefetch, first_page: int, slots: Slots) -> Node:
        assert prefetch.pinned is not None
        return self._landing.hang(lease, prefetch.pinned, first_page, slots)

    # ---- from the last page to the first

    def _read_back(self, lease: Lease, prefetch: Prefetch, planned: int) -> None:
        """Start reading the pages from the last on, as far as there is room; `planned` of the first are to be computed."""
        count, pages = self._claim(lease, prefetch), len(prefetch.keys) - 1
        if count < 1:
            return
        prefetch.back = Back(prefetch.start_page + pages)
        prefetch.planned = planned
        prefetch.deadline_s = math.inf  # nobody waits for it
        least = pages - count
        for last in range(pages, least, -prefetch.batch):
            self._read_back_batch(lease, prefetch, max(least, last - prefetch.batch), last)

    def _back_batch(self, pages: int) -> int:
        """In how large batches to read a back of `pages` pages."""
        quick = min(PAGES_A_READ, math.ceil(self._t.planner.quick_call_pages()))
        return max(1, min(self._batch, max(quick, pages // BACK_BATCHES)))

    def _read_back_batch(self, lease: Lease, prefetch: Prefetch, first: int, last: int) -> None:
        t, back = self._t, prefetch.back
        assert back is not None
        slots = t.host.take(last - first)

        def landed(op: PrefetchOp, good: int) -> None:
            prefetch.open.remove(op)
            if prefetch.broken or t.worker is None:
                t.host.give(slots)
                return
            flags = np.zeros(len(slots), np.bool_)
            flags[: len(op.outcomes)] = [outcome is GetOutcome.HIT for outcome in op.outcomes]
            t.host.give(back.land(Batch(prefetch.start_page + first, slots, flags)))
            if back.torn:
                for each in prefetch.open:
                    each.cancelled = True
            if not prefetch.open and prefetch.pinned is not None:
                self._met_waiting(lease, prefetch, back)

        prefetch.open.append(self._mover.prefetch(self._refs(lease, prefetch, first, last), slots, landed))

    def _met_waiting(self, lease: Lease, prefetch: Prefetch, back: Back) -> None:
        """All that could be read has landed before the lease was admitted: attach what needs no computing before it."""
        if back.first == prefetch.start_page and len(back):
            prefetch.attached = len(back)
            prefetch.pinned = self._hang(lease, prefetch, back.first, back.take())
            self._abandon(prefetch)

    def met(self, lease: Lease) -> Node:
        """Attach the back of a running lease whose front has reached it; ends the prefetch.

        `lease.node` ends with the lease's shared pages and is pinned; the pin is on the returned node now, where the back ends.
        """
        t, size, prefetch = self._t, self._t.geometry.page_size, lease.prefetch
        assert prefetch is not None
        assert lease.node is not None
        back = prefetch.back
        assert back is not None
        assert back.first <= lease.shared < back.end
        both = lease.shared - back.first
        first, slots = back.first, back.take()
        if both:
            self._landing.keep_mirrors(t.tree.path_ids(lease.node)[first:], slots[:both])
        node = self._landing.hang(lease, lease.node, lease.shared, slots[both:])
        computed = lease.shared - lease.reused
        t.metrics.recomputed_tokens.labels("overlap").inc(computed * size)
        for what, pages in (("planned", prefetch.planned), ("computed", computed), ("loaded", back.end - lease.shared)):
            t.metrics.overlap_tokens.labels(what).inc(pages * size)
        prefetch.attached = prefetch.wanted
        self.stop(lease)
        return node

    def front_end(self, lease: Lease, front: int) -> int:
        """To which page a running lease that has computed `front` pages goes on, before it looks again at what has landed."""
        prefetch = lease.prefetch
        assert prefetch is not None
        back = prefetch.back
        assert back is not None
        gap = back.first - front
        if gap <= self._least:
            return back.first if gap > 0 else front + self._least
        read_s = self._back_read_s(prefetch, gap)
        if read_s is not None:
            landed = prefetch.start_page + len(prefetch.keys) - 1 - back.first
            elapsed_s = self._t.clock() - prefetch.begun_s
            read_s = max(read_s, gap * elapsed_s / (landed + prefetch.batch))
        left = self._front_pages(front, gap, read_s) if prefetch.open else gap
        return front + max(self._least, int(STEP_SHARE * (gap if left is None else left)))

    def _back_read_s(self, prefetch: Prefetch, pages: int) -> float | None:
        """Seconds to read `pages` pages of a back in its batches; None if that is not known."""
        return self._t.planner.read_s(-(-pages // prefetch.batch) * store_calls(prefetch.batch), pages)

    def _front_pages(self, first: int, pages: int, read_s: float | None) -> float | None:
        """How many of the pages [first, first + pages) to compute while the others are read; None if that is not known."""
        size = self._t.geometry.page_size
        steps = 1 + max(0.0, math.log(pages / 2 / self._least, 1 / (1 - STEP_SHARE)))
        tokens = self._t.planner.front_tokens(first * size, pages * size, read_s, steps)
        return None if tokens is None else tokens / size
