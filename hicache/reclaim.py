"""Making room in a tier: which copy goes, and where its page goes first.

A victim is a leaf of its tier, the last page of a node first, with nothing in flight and no user. On the device it is

    clean    it has a host copy (dropped: the page is host-only now), or nothing depends on it and the disk has it (forgotten)
    dirty    it has neither: copied down first if the write policy keeps it, else forgotten and counted as dropped

A victim on the host is clean if the store has it, or there is no store; a dirty one is written to the store first, once.

What has to be copied frees its slot only after the copy has landed, so making room may take a few steps; the caller asks again.
A store that stalls is not waited for, and a copy that failed is not tried again at once: pages are dropped and counted.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from hicache.page_table import NOT_STORED, NOWHERE, STORED
from hicache.tiers import as_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.moves import Mover
    from hicache.radix_tree import Node
    from hicache.tiers import Tiers

__all__ = ["Reclaimer"]


MOST_BUSY = 64
"""Busy mirrors looked at before the search for one that may go is given up."""


class _Fate(enum.Enum):
    """What becomes of a device victim."""

    DEMOTE = "demote"  # it has a host copy
    FORGET = "forget"  # the disk has it, and nothing below needs it
    COPY = "copy"  # must be copied to the host first
    DROP = "drop"  # the policy does not keep it


class Reclaimer:
    """Makes room on device and host. Owned by the scheduler thread."""

    def __init__(self, tiers: Tiers, mover: Mover) -> None:
        self._t = tiers
        self._mover = mover

    @property
    def pending(self) -> bool:
        """Whether copies in flight will make room, so that asking again later helps."""
        t = self._t
        return t.copying > 0 or (t.coming_host > 0 and not t.store_stalls)

    # ---- device

    def device_room(self, need: int) -> bool:
        """Make `need` device slots free; False if that takes longer (see `pending`) or can't be done."""
        t = self._t
        if t.device.free >= need:
            return True
        self._demote_until(lambda: t.device.free + t.coming_device >= need, need)
        if t.device.free < need and not self.pending:
            self._drop_until(need)
            t.backups_fail = False  # who asks next tries again
        return t.device.free >= need

    def in_background(self) -> None:
        """Keep a margin of free slots ahead of need, where the write policy says so."""
        t = self._t
        if not t.rules.in_background or t.config.host_pages == 0:
            return
        low, high = (int(share * t.device.capacity) for share in (t.config.watermark_low, t.config.watermark_high))
        if t.device.free + t.coming_device < low:
            self._demote_until(lambda: t.device.free + t.coming_device >= high, high)
        low, high = (int(share * t.host.capacity) for share in (t.config.watermark_low, t.config.watermark_high))
        if t.worker is not None and t.host.free + t.coming_host < low:
            self.host_room(high)

    def _demote_until(self, enough: Callable[[], bool], need: int) -> None:
        """Demote leaves in eviction order, copying where needed and possible; pass over what can't be copied now."""
        may_go = self._device_idle
        while not enough():
            node = self._t.tree.device_order.pick(may_go)
            if node is None:
                return
            if not self._demote(node, need - self._t.device.free - self._t.coming_device):
                may_go = self._goes_uncopied  # the host has no room for any other either

    def _device_idle(self, node: Node) -> bool:
        return not self._t.table.device_busy[node.pages[node.device_len - 1]]

    def _goes_uncopied(self, node: Node) -> bool:
        return self._device_idle(node) and self._fate(node, node.device_len - 1) is not _Fate.COPY

    def _demote(self, node: Node, most: int) -> bool:
        """Let a run of pages at the end of the node's device part go, all by the same way; False if they must wait."""
        t = self._t
        most = 1 if node.device.ends else max(1, most)
        idle = t.idle_tail(t.table.device_busy, node.pages, node.device_len, most)
        fate = self._fate(node, node.device_len - 1)
        count = 1
        while count < idle and self._fate(node, node.device_len - 1 - count) is fate:
            count += 1
        match fate:
            case _Fate.DEMOTE:
                t.demote(node, count)
            case _Fate.FORGET:
                t.forget(node, count)
            case _Fate.DROP:
                t.metrics.dropped_pages.labels("below_threshold").inc(count)
                t.forget(node, count)
            case _Fate.COPY:
                return self._copy_down(node, count)
        t.metrics.evicted_pages.labels("device").inc(count)
        return True

    def _fate(self, node: Node, index: int) -> _Fate:
        t, page = self._t, node.pages[index]
        if t.table.host_slot[page] != NOWHERE:
            return _Fate.DEMOTE
        needed_below = bool(node.children) or node.device_len < len(node.pages)
        if not needed_below and (t.table.store[page] == STORED or t.config.host_pages == 0):
            return _Fate.FORGET
        if needed_below or t.table.hit[page] >= t.rules.keep_hits:
            return _Fate.COPY
        return _Fate.DROP

    def _copy_down(self, node: Node, count: int) -> bool:
        t = self._t
        if t.backups_fail:
            return False  # dropped rather than tried for ever
        count = min(count, self.host_room(count))
        if count == 0:
            return False
        ids = as_ids(node.pages[node.device_len - count : node.device_len])
        self._mover.demote(node, ids, t.host.take(count))
        return True

    def _drop_until(self, need: int) -> None:
        """Last resort: forget leaves that have no lower copy and can't get one now, and what hangs below them."""
        t = self._t
        while t.device.free < need:
            node = t.tree.device_order.pick(lambda node: self._device_idle(node) and self._prunable(node))
            if node is None:
                return
            fate = self._fate(node, node.device_len - 1)
            if fate is not _Fate.COPY:
                self._demote(node, need - t.device.free)
                continue
            self._prune(node)
            count = 0
            idle = t.idle_tail(t.table.device_busy, node.pages, node.device_len, need - t.device.free)
            while count < idle and t.table.host_slot[node.pages[node.device_len - 1 - count]] == NOWHERE:
                count += 1
            t.metrics.dropped_pages.labels("host_full").inc(count)
            t.metrics.evicted_pages.labels("device").inc(count)
            t.forget(node, count)

    def _prunable(self, node: Node) -> bool:
        """Whether nobody uses what hangs below the node's device part (a load-back does, a write to the store does not)."""
        return not any(child.users for child in self._below(node))

    def _prune(self, node: Node) -> None:
        """Forget all that hangs below the node's device part."""
        t = self._t
        for child in reversed(self._below(node)):
            t.metrics.dropped_pages.labels("orphaned").inc(len(child.pages))
            t.forget(child, len(child.pages))
        if node.host_len:
            t.metrics.dropped_pages.labels("orphaned").inc(node.host_len)
            t.forget(node, node.host_len)

    @staticmethod
    def _below(node: Node) -> list[Node]:
        """All descendants, parents first."""
        out = node.child_list()
        for child in out:
            out.extend(child.child_list())
        return out

    # ---- host

    def host_room(self, need: int) -> int:
        """Make up to `need` host slots free, without waiting; returns how many of `need` are."""
        t, mirrors_first = self._t, self._spare_mirrors
        if mirrors_first:
            self._drop_mirrors(need)
        while t.host.free + t.coming_host < need:
            node = t.tree.host_order.pick(self._host_idle)
            if node is None:
                break
            self._demote_from_host(node, need - t.host.free - t.coming_host)
        if not mirrors_first:
            self._drop_mirrors(need)
        return min(need, t.host.free)

    @property
    def _spare_mirrors(self) -> bool:
        """Whether mirrors are the first to go.

        Not where the policy copies down what is on the device, and only the host keeps it and has room for all of it: a page
        that lost its mirror is copied again before it leaves, while somebody waits.
        """
        t = self._t
        return t.worker is not None or t.rules.backup_hits is None or t.host.capacity < t.device.capacity

    def _drop_mirrors(self, need: int) -> None:
        """Give up host copies of pages that are on the device, youngest first: the old ones will be needed sooner."""
        t = self._t
        lacking = need - t.host.free
        if lacking <= 0:
            return
        busy: list[int] = []
        gone: list[int] = []
        while len(gone) < lacking and t.mirrors and len(busy) < MOST_BUSY:
            page, _ = t.mirrors.popitem()
            (busy if t.table.host_busy[page] else gone).append(page)
        for page in reversed(busy):
            t.mirrors[page] = None
        if gone:
            t.leave_host(np.array(gone, np.int32))
            t.metrics.evicted_pages.labels("host").inc(len(gone))

    def _host_idle(self, node: Node) -> bool:
        return not self._t.table.host_busy[node.pages[-1]]

    def _disk_state(self, page: int) -> tuple[int, bool]:
        """Whether the store has a page, and whether it was used often enough to go there."""
        return self._t.table.store[page], self._t.table.hit[page] >= self._t.rules.store_hits

    def _demote_from_host(self, node: Node, most: int) -> None:
        """Let a run of host-only pages at the end of a leaf go: to the store if it may not have them, else for good."""
        t = self._t
        pages, end = node.pages, len(node.pages)
        most = 1 if node.host.ends else max(1, min(most, node.host_len))
        idle = t.idle_tail(t.table.host_busy, pages, end, most)
        state, admitted = self._disk_state(pages[end - 1])
        count = 1
        while count < idle and self._disk_state(pages[end - 1 - count]) == (state, admitted):
            count += 1
        if t.worker is not None and state == NOT_STORED and admitted and not t.store_stalls:
            self._mover.store(node, end - count, as_ids(pages[end - count :]))
            return
        if t.worker is not None and state != STORED:
            t.metrics.dropped_pages.labels("not_stored").inc(count)
        t.metrics.evicted_pages.labels("host").inc(count)
        t.forget(node, count)
