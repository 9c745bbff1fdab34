"""Brings pages of waiting requests up from disk: asks how long the hit is, reads it in batches, attaches what is good.

A waiting request holds a share of the quota and the slots of batches in flight, no more; both are released on every exit.
Pages that landed are ordinary host pages: a request that is aborted leaves them to the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.lease import Prefetch
from hicache.page_table import NOWHERE, STORED
from hicache.policies.prefetch import prefetch_deadline_s
from hicache.tiers import as_ids
from storage.base import PageRef

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from hicache.lease import Lease
    from hicache.moves import Mover
    from hicache.radix_tree import Match
    from hicache.reclaim import Reclaimer
    from hicache.tiers import Tiers
    from hicache.transfer.operation import PrefetchOp, ProbeOp

    Slots = npt.NDArray[np.int32]

__all__ = ["Prefetcher"]

BATCH_BYTES = 16 << 20


class Prefetcher:
    """Runs the prefetches of all waiting leases. Owned by the scheduler thread."""

    def __init__(self, tiers: Tiers, mover: Mover, reclaimer: Reclaimer) -> None:
        self._t = tiers
        self._mover = mover
        self._reclaimer = reclaimer
        self.quota_pages = int(tiers.config.prefetch.quota * tiers.config.host_pages)
        self.quota_used = 0
        self._batch = max(1, BATCH_BYTES // tiers.geometry.page_bytes)

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
        deadline = t.clock() + self._patience_s(match.pages, missing)
        lease.prefetch = prefetch = Prefetch(deadline_s=deadline, start_page=match.pages)

        def found(op: ProbeOp) -> None:
            prefetch.probe = None
            if not prefetch.broken and t.worker is not None and op.found * t.geometry.page_size >= config.threshold_tokens:
                self._found(lease, prefetch, [parent, *keys[: op.found]])

        prefetch.probe = self._mover.probe(keys, found)

    def _patience_s(self, start_page: int, pages: int) -> float:
        """How long a request may wait for `pages` pages: as the policy says, but `timeout` no longer than computing takes."""
        t, size = self._t, self._t.geometry.page_size
        policy_s = prefetch_deadline_s(t.config.prefetch, pages * size)
        compute_s = t.planner.compute_s(start_page * size, pages * size)
        if t.config.prefetch.policy != "timeout" or compute_s is None:
            return policy_s
        return min(policy_s, compute_s)

    def _found(self, lease: Lease, prefetch: Prefetch, keys: list[bytes]) -> None:
        """The store has the pages whose keys are keys[1:]: read them, unless computing them is quicker."""
        t, size, pages = self._t, self._t.geometry.page_size, len(keys) - 1
        if t.config.prefetch.policy == "timeout" and not t.planner.pays(prefetch.start_page * size, pages * size, pages):
            t.metrics.recomputed_tokens.labels("slow_store").inc(pages * size)
            return
        self._read(lease, prefetch, keys)

    def stop(self, lease: Lease) -> None:
        """Let the lease go on without what has not landed. Idempotent; slots come back as operations end."""
        prefetch, lease.prefetch = lease.prefetch, None
        if prefetch is None:
            return
        if prefetch.open and not prefetch.broken:
            late = prefetch.wanted - prefetch.attached
            self._t.metrics.recomputed_tokens.labels("late").inc(late * self._t.geometry.page_size)
        self._abandon(prefetch)
        self._release_quota(prefetch)

    def _abandon(self, prefetch: Prefetch) -> None:
        prefetch.broken = True
        if prefetch.probe is not None:
            prefetch.probe.cancelled = True
        for op in prefetch.open:
            op.cancelled = True
        if prefetch.pinned is not None:
            self._t.tree.unpin(prefetch.pinned)
            prefetch.pinned = None

    def _release_quota(self, prefetch: Prefetch) -> None:
        self.quota_used -= prefetch.quota_pages
        prefetch.quota_pages = 0

    def _read(self, lease: Lease, prefetch: Prefetch, keys: list[bytes]) -> None:
        """Start reading the pages whose keys are keys[1:]; keys[0] is their parent's."""
        t, tree = self._t, self._t.tree
        page = tree.page_key_bytes
        match = tree.match(lease.root, lease.tokens, prefetch.start_page * page)
        if match.pages < prefetch.start_page:
            return  # what the probe followed has been evicted meanwhile
        device, host, _ = lease.found
        lease.found = (device, host, len(keys) - 1)
        count = min(len(keys) - 1, self.quota_pages - self.quota_used)
        if count < 1:
            t.metrics.dropped_pages.labels("prefetch_quota").inc(len(keys) - 1)
            return
        prefetch.pinned = match.node if match.depth == len(match.node.pages) else tree.split(match.node, match.depth)
        tree.pin(prefetch.pinned)
        count = self._reclaimer.host_room(count)
        prefetch.wanted = prefetch.quota_pages = count
        self.quota_used += count
        root = bytes(lease.root.hashes)
        for first in range(0, count, self._batch):
            last = min(first + self._batch, count)
            at = (prefetch.start_page + first) * page
            refs = [
                PageRef(keys[i + 1], keys[i], root, bytes(lease.tokens[at + (i - first) * page : at + (i - first + 1) * page]))
                for i in range(first, last)
            ]
            self._read_batch(lease, prefetch, refs)
        if not prefetch.open:
            self._abandon(prefetch)

    def _read_batch(self, lease: Lease, prefetch: Prefetch, refs: list[PageRef]) -> None:
        t = self._t
        slots = t.host.take(len(refs))

        def landed(op: PrefetchOp, good: int) -> None:
            prefetch.open.remove(op)
            if prefetch.broken or prefetch.pinned is None or t.worker is None:
                good = 0
            t.host.give(slots[good:])
            if good:
                self._attach(lease, prefetch, slots[:good])
            if good < len(slots) or not prefetch.open:
                self._abandon(prefetch)  # nothing after a gap can be attached

        prefetch.open.append(self._mover.prefetch(refs, slots, landed))

    def _attach(self, lease: Lease, prefetch: Prefetch, slots: Slots) -> None:
        """Hang pages that landed in `slots` below the pinned node. Those computed meanwhile get a host copy, or need none."""
        t, tree = self._t, self._t.tree
        page = tree.page_key_bytes
        first = prefetch.start_page + prefetch.attached
        prefetch.attached += len(slots)
        node = prefetch.pinned
        assert node is not None
        match = tree.match(node, lease.tokens, (first + len(slots)) * page, first * page)
        end = match.node
        if match.depth < len(end.pages) and match.pages:
            end = tree.split(end, match.depth)
        if match.pages:
            self._keep_mirrors(tree.ids_between(node, end), slots[: match.pages])
        tree.pin(end)  # now, so that a node that a running request ends at does not grow in place
        tree.unpin(node)
        rest = slots[match.pages :]
        if len(rest):
            ids = t.table.new(len(rest))
            t.table.stored[ids] = STORED
            at = (first + match.pages) * page
            tokens = lease.tokens[at : (first + len(slots)) * page]
            grown = tree.grow(end, tokens, ids, on_device=False, priority=lease.priority)
            t.introduce(grown, as_ids(ids))
            t.land_on_host(as_ids(ids), rest)
            if grown is not end:
                tree.pin(grown)
                tree.unpin(end)
                end = grown
        prefetch.pinned = end

    def _keep_mirrors(self, ids: Slots, slots: Slots) -> None:
        t = self._t
        t.table.stored[ids] = STORED
        lacking = (t.table.host_slots.take(ids) == NOWHERE) & (t.table.device_busys.take(ids) == 0)
        t.land_on_host(ids[lacking], slots[lacking])
        t.host.give(slots[~lacking])
