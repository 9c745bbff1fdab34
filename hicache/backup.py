"""Copies down: which pages of a node get a host copy or a record in the store, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.page_table import NOT_STORED, NOWHERE
from hicache.tiers import as_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicache.moves import Mover
    from hicache.radix_tree import Node
    from hicache.reclaim import Reclaimer
    from hicache.tiers import Tiers

    Ids = npt.NDArray[np.int32]

__all__ = ["Backup"]


class Backup:
    """Backs pages up as far as there is room for it; never waits. Owned by the scheduler thread."""

    def __init__(self, tiers: Tiers, mover: Mover, reclaimer: Reclaimer) -> None:
        self._t = tiers
        self._mover = mover
        self._reclaimer = reclaimer

    def reused(self, node: Node) -> None:
        """Copy down pages of the path that have just been used often enough (parents first)."""
        t, threshold = self._t, self._t.rules.backup_hits
        if threshold is None or threshold == 1:
            return
        for each in t.tree.path(node):
            ids = as_ids(each.pages[: each.device_len])
            if (t.table.hits.take(ids) == threshold).any():
                self.pages(each, 0, ids)

    def pages(self, node: Node, first: int, ids: Ids) -> None:
        """Copy what pages [first, first + len(ids)) of `node` lack down to the host, as far as it has room; count the rest."""
        t = self._t
        if t.config.host_pages == 0:
            return
        for at, count in _runs(self._lacks_host(ids)):
            room = self._reclaimer.host_room(count)
            if room < count:
                t.metrics.dropped_pages.labels("backup_declined").inc(count - room)
            if room:
                self._mover.back_up(node, first + at, ids[at : at + room], t.host.take(room))
            if room < count:
                return

    def _lacks_host(self, ids: Ids) -> npt.NDArray[np.bool_]:
        table = self._t.table
        lacks: npt.NDArray[np.bool_] = (table.host_slots.take(ids) == NOWHERE) & (table.device_busys.take(ids) == 0)
        return lacks

    def to_store(self, node: Node) -> bool:
        """Start what brings `node` to the store; True when every page is there, or was refused."""
        table = self._t.table
        ids = as_ids(node.pages)
        idle = (table.device_busys.take(ids) == 0) & (table.host_busys.take(ids) == 0)
        fresh = (table.stored.take(ids) == NOT_STORED) & idle & (table.hits.take(ids) >= self._t.rules.store_hits)
        on_host = table.host_slots.take(ids) != NOWHERE
        for at, count in _runs(fresh & on_host):
            self._mover.store(node, at, ids[at : at + count])
        for at, count in _runs(fresh & ~on_host):
            self.pages(node, at, ids[at : at + count])
        return not bool((table.stored.take(ids) == NOT_STORED).any())


def _runs(mask: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(first, count) of each stretch of True."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        yield first, end - first
