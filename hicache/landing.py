"""Hangs pages that came from disk into the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.page_table import NOWHERE, STORED
from hicache.tiers import as_ids

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from hicache.lease import Lease
    from hicache.radix_tree import Node
    from hicache.tiers import Tiers

    Slots = npt.NDArray[np.int32]

__all__ = ["Landing"]


class Landing:
    """Gives host slots that hold pages of a prompt to the pages they belong to. Owned by the scheduler thread."""

    def __init__(self, tiers: Tiers) -> None:
        self._t = tiers

    def hang(self, lease: Lease, node: Node, first: int, slots: Slots) -> Node:
        """Hang pages [first, first + len(slots)) of the lease's tokens below `node`, which ends at page `first` and is pinned.

        Pages that were computed meanwhile get a host copy, or need none: then the slot is free again. Returns the node where
        they end; the pin of `node` is on that one now.
        """
        t, tree = self._t, self._t.tree
        page = tree.page_key_bytes
        match = tree.match(node, lease.tokens, (first + len(slots)) * page, first * page)
        end = match.node
        if match.depth < len(end.pages) and match.pages:
            end = tree.split(end, match.depth)
        if match.pages:
            self.keep_mirrors(tree.ids_between(node, end), slots[: match.pages])
        tree.pin(end)  # now, so that a node that a running request ends at does not grow in place
        tree.unpin(node)
        rest = slots[match.pages :]
        if not len(rest):
            return end
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
        return grown

    def keep_mirrors(self, ids: Slots, slots: Slots) -> None:
        """Give slots to pages in the tree that lack a host copy, and free the others."""
        t = self._t
        t.table.stored[ids] = STORED
        lacking = (t.table.host_slots.take(ids) == NOWHERE) & (t.table.device_busys.take(ids) == 0)
        t.land_on_host(ids[lacking], slots[lacking])
        t.host.give(slots[~lacking])
