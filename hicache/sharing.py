"""Sharing: how pages that one request computed become everybody's, and which copy stays when two computed the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.page_table import NOWHERE
from hicache.tiers import as_ids

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicache.backup import Backup
    from hicache.lease import Lease
    from hicache.radix_tree import Match, Node
    from hicache.tiers import Tiers

    Ids = npt.NDArray[np.int32]

__all__ = ["Sharing"]


class Sharing:
    """Moves the border between what a lease owns and what it shares. Owned by the scheduler thread."""

    def __init__(self, tiers: Tiers, backup: Backup) -> None:
        self._t = tiers
        self._backup = backup

    def share(self, lease: Lease, full: int) -> None:
        """The first `full` pages of an active lease are computed: share them through the tree, back up what the policy says."""
        tree, page = self._t.tree, self._t.tree.page_key_bytes
        node = lease.node
        assert node is not None
        match = tree.match(node, lease.tokens, full * page, lease.shared * page)
        if match.pages:
            end = self.ends_at(match)
            if not self._adopt(lease, tree.ids_between(node, end), end):
                return
            self.move_pin(lease, end)
        if lease.shared < full:
            self._share_new(lease, full)

    def ends_at(self, match: Match) -> Node:
        """The node that ends where the match ends, split off if need be."""
        if match.depth == len(match.node.pages):
            return match.node
        return self._t.tree.split(match.node, match.depth)

    def _adopt(self, lease: Lease, ids: Ids, end: Node) -> bool:
        """Share pages that the tree has already: use its device copies instead of ours, or give it ours.

        False if some are just being loaded back for another request; they stay ours until a later commit.
        """
        t = self._t
        if t.table.loading.take(ids).any():
            return False
        first, last = lease.shared, lease.shared + len(ids)
        mine = lease.slots[first:last].copy()
        theirs = t.table.device_slots.take(ids)
        there = theirs != NOWHERE
        t.device.give(mine[there])
        lease.slots[first:last][there] = theirs[there]
        t.land_on_device(ids[~there], mine[~there])
        self._t.promote_path(end)
        lease.shared = last
        return True

    def _share_new(self, lease: Lease, full: int) -> None:
        """Insert own full pages that the tree lacks."""
        t, page = self._t, self._t.tree.page_key_bytes
        assert lease.node is not None
        pages = t.table.new(full - lease.shared)
        ids = as_ids(pages)
        t.table.hits[ids] = hits = self._seen_before(lease, full)
        tokens = lease.tokens[lease.shared * page : full * page]
        node = t.tree.grow(lease.node, tokens, pages, on_device=True, priority=lease.priority)
        t.introduce(node, ids)
        t.land_on_device(ids, lease.slots[lease.shared : full].copy())
        lease.shared = full
        if node is not lease.node:
            self.move_pin(lease, node)
        threshold = t.rules.backup_hits
        if threshold is not None and hits[0] >= threshold:
            often = ids[hits >= threshold]  # the front: who uses a page uses all before it
            self._backup.pages(node, len(node.pages) - len(ids), often)

    def _seen_before(self, lease: Lease, full: int) -> Ids:
        """How often pages [shared, full) of a lease were used, now included."""
        hits = np.ones(full - lease.shared, np.int32)
        if lease.counts is not None:
            known = lease.counts[lease.shared : full]
            hits[: len(known)] = known
        return hits

    def move_pin(self, lease: Lease, node: Node) -> None:
        assert lease.node is not None
        self._t.tree.pin(node)
        self._t.tree.unpin(lease.node)
        lease.node = node
