"""The state that the parts of the cache share, and the few things that may be done to a page's copies.

Everything here belongs to the scheduler thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicache.adaptive import AdaptiveOrder
from hicache.ghosts import Ghosts
from hicache.keys import tenant_name
from hicache.learner import Learner
from hicache.page_table import NOT_STORED, NOWHERE, PageTable
from hicache.policies.planner import Planner
from hicache.policies.write import WriteRules, write_rules
from hicache.pools import SlotPool
from hicache.radix_tree import Match, Node, RadixTree
from storage.base import NamespaceInfo, PageRef

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping
    from queue import SimpleQueue

    import numpy.typing as npt

    from hicache.config import CacheConfig
    from hicache.events import PageEvents
    from hicache.geometry import PageGeometry
    from hicache.keys import KeyChain, Namespace
    from hicache.metrics import CacheMetrics
    from hicache.transfer.operation import Copier, Operation, StoreRunner

    Ids = npt.NDArray[np.int32]

__all__ = ["Tiers", "as_ids"]

STALL_S = 2.0

GHOSTS_A_PAGE = 4
"""Evicted pages that are remembered for each page in memory."""

LEAST_GHOSTS = 1 << 16
"""Pages that are remembered however few fit into memory; each takes little more than its tokens."""


def as_ids(pages: array[int]) -> Ids:
    """An own int32 array of a run of pages (a view would keep the run from growing)."""
    return np.array(pages, np.int32)


class Known(NamedTuple):
    """A namespace, and how it is described to a store."""

    namespace: Namespace
    info: NamespaceInfo


@dataclass(eq=False)
class Tiers:
    """Tree, table, slot pools, workers: one of each.

    mirrors: pages on device and host whose host copy could go, oldest backup first (a dict for its order).
    namespaces: what a store shall know of each namespace that has pages, by root key.
    storing: writes to the store in flight, oldest first. orphans: pages in them that have left the tree.
    admitted: leases that are loading or active.
    in_flight: operations that have not been drained; copying: those of them between device and host. coming_device,
    coming_host: pages that copies in flight will make droppable from that tier.
    backups_fail: whether the last copy to the host that ended failed.
    """

    config: CacheConfig
    geometry: PageGeometry
    chain: KeyChain
    metrics: CacheMetrics
    copier: Copier | None
    completions: SimpleQueue[Operation]
    worker: StoreRunner | None = None
    clock: Callable[[], float] = time.monotonic
    events: PageEvents | None = None
    mirrors: dict[int, None] = field(default_factory=dict)
    namespaces: dict[bytes, Known] = field(default_factory=dict)
    storing: dict[Operation, None] = field(default_factory=dict)
    orphans: set[int] = field(default_factory=set)
    admitted: int = 0
    in_flight: int = 0
    copying: int = 0
    coming_device: int = 0
    coming_host: int = 0
    backups_fail: bool = False

    def __post_init__(self) -> None:
        config = self.config
        self.rules: WriteRules = write_rules(config)
        self.planner = Planner(self.clock)
        self.device = SlotPool(config.device_pages)
        self.host = SlotPool(config.host_pages)
        self.table = PageTable(config.device_pages + config.host_pages)
        learner = Learner()
        make_order = partial(AdaptiveOrder[Node], learner) if config.eviction == "adaptive" else None
        self.ghosts: Ghosts | None = None
        if make_order is not None or self.rules.counts_uses:
            self.ghosts = Ghosts(
                self.geometry.page_size,
                max(LEAST_GHOSTS, (1 + GHOSTS_A_PAGE) * self.table.capacity),
                learner,
                counts=self.rules.counts_uses,
            )
        self.tree = RadixTree(self.geometry.page_size, config.eviction, self.chain.key_bytes, make_order)

    @property
    def store_stalls(self) -> bool:
        """Whether the oldest write to the store takes so long that nobody should wait for it."""
        oldest = next(iter(self.storing), None)
        return oldest is not None and time.perf_counter() - oldest.started_s > STALL_S

    def hold_root(self, namespace: Namespace, labels: Mapping[str, str]) -> Node:
        """Hold the namespace's root, and remember how to describe it to a store."""
        key = self.chain.root(namespace)
        root = self.tree.hold_root(key)
        if key not in self.namespaces:
            if len(self.namespaces) > 64 + 2 * len(self.tree.roots):
                self.namespaces = {key: known for key, known in self.namespaces.items() if key in self.tree.roots}
            self.namespaces[key] = Known(namespace, NamespaceInfo(key, labels, tenant_name(namespace.cache_salt)))
        return root

    def rekey(self, chain: KeyChain) -> None:
        """Go on with another store's key chain: all keys are forgotten and computed anew when needed; no page is stored yet.

        Nothing may be on its way to or from a store.
        """
        assert chain.key_bytes == self.chain.key_bytes
        self.chain = chain
        for node in self.tree.nodes():
            node.hashes = b""
        known, self.namespaces = self.namespaces, {}
        for key, (namespace, info) in known.items():
            new = chain.root(namespace)
            self.namespaces[new] = Known(namespace, NamespaceInfo(new, info.labels, info.tenant))
            self.tree.rename_root(key, new)
        self.forget_stored()
        if self.events is not None:
            self._announce_anew(self.events)

    def _announce_anew(self, events: PageEvents) -> None:
        """All keys have changed: announce every page under its new one."""
        for node in self.tree.nodes():
            ids = as_ids(node.pages)
            events.forget(ids.tolist())
            self.introduce(node, ids)
            events.landed(ids[self.table.device_slots.take(ids) != NOWHERE].tolist(), "device")
            events.landed(ids[self.table.host_slots.take(ids) != NOWHERE].tolist(), "host")

    def forget_stored(self) -> None:
        """Take it that the store has none of the pages in memory."""
        self.table.stored[:] = NOT_STORED

    # ---- keys

    def keys(self, node: Node) -> bytes:
        """Keys of all pages of `node`, computed where they were not needed before."""
        size = self.chain.key_bytes
        if node.parent is None or len(node.hashes) == len(node.pages) * size:
            return node.hashes
        for each in self.tree.path(node):
            done = len(each.hashes) // size
            if done < len(each.pages):
                assert each.parent is not None
                before = each.hashes[-size:] if done else each.parent.hashes[-size:]
                each.hashes += b"".join(self.chain.extend(before, bytes(each.key[done * self.tree.page_key_bytes :])))
        return node.hashes

    def key_at(self, node: Node, depth: int) -> bytes:
        """Key of the page that ends `depth` pages into `node`; the root key for a root."""
        keys, size = self.keys(node), self.chain.key_bytes
        if node.parent is None:
            return keys
        return keys[(depth - 1) * size : depth * size]

    def refs(self, node: Node, first: int, count: int) -> list[PageRef]:
        """What the store must know of pages [first, first + count) of `node`."""
        size, page = self.chain.key_bytes, self.tree.page_key_bytes
        keys = self.keys(node)
        above = node.parent
        assert above is not None
        parent = self.keys(above)[-size:] if first == 0 else keys[(first - 1) * size : first * size]
        root = self._root(node).hashes
        out = []
        for i in range(first, first + count):
            key = keys[i * size : (i + 1) * size]
            out.append(PageRef(key, parent, root, bytes(node.key[i * page : (i + 1) * page])))
            parent = key
        return out

    def _root(self, node: Node) -> Node:
        while node.parent is not None:
            node = node.parent
        return node

    # ---- copies of pages

    def introduce(self, node: Node, ids: Ids) -> None:
        """Tell whoever follows events what the last pages of `node`, which are new, stand for."""
        if self.events is not None:
            self.events.introduce(ids.tolist(), self.refs(node, len(node.pages) - len(ids), len(ids)))

    def land_on_device(self, ids: Ids, slots: Ids) -> None:
        """The bytes of these pages are in these device slots now, which become theirs."""
        self.table.device_slots[ids] = slots
        if self.events is not None:
            self.events.landed(ids.tolist(), "device")
        for i, host in zip(ids.tolist(), self.table.host_slots.take(ids).tolist(), strict=True):
            if host != NOWHERE:
                self.mirrors[i] = None

    def land_on_host(self, ids: Ids, slots: Ids) -> None:
        """The bytes of these pages are in these host slots now, which become theirs."""
        self.table.host_slots[ids] = slots
        if self.events is not None:
            self.events.landed(ids.tolist(), "host")
        for i, device in zip(ids.tolist(), self.table.device_slots.take(ids).tolist(), strict=True):
            if device != NOWHERE:
                self.mirrors[i] = None

    def leave_device(self, ids: Ids) -> None:
        """Free these pages' device slots."""
        if not len(ids):
            return
        self.device.give(self.table.device_slots.take(ids))
        self.table.device_slots[ids] = NOWHERE
        if self.events is not None:
            self.events.left(ids.tolist(), "device")
        for i in ids.tolist() if self.mirrors else ():
            self.mirrors.pop(i, None)

    def leave_host(self, ids: Ids) -> None:
        """Free these pages' host slots."""
        if not len(ids):
            return
        self.host.give(self.table.host_slots.take(ids))
        self.table.host_slots[ids] = NOWHERE
        if self.events is not None:
            self.events.left(ids.tolist(), "host")
        for i in ids.tolist() if self.mirrors else ():
            self.mirrors.pop(i, None)

    def load_pays(self, match: Match) -> bool:
        """Whether loading the host pages of a match back is expected to be quicker than computing them."""
        size, pages = self.geometry.page_size, match.pages - match.device
        return not pages or self.planner.load_pays(match.device * size, pages * size, pages)

    def promote_path(self, node: Node) -> None:
        """Tell the tree which pages up to `node` are on the device by now."""
        slot = self.table.device_slot
        for each in self.tree.path(node):
            assert each.parent is not None
            if each.parent.device_len < len(each.parent.pages):
                return
            at = each.device_len
            while at < len(each.pages) and slot[each.pages[at]] != NOWHERE:
                at += 1
            self.tree.promote(each, at - each.device_len)

    def demote(self, node: Node, count: int) -> None:
        """Drop the device copies of the last `count` device pages of `node`; each has a host copy."""
        ids = as_ids(node.pages[node.device_len - count : node.device_len])
        self.tree.demote(node, count)
        self.leave_device(ids)

    def forget(self, node: Node, count: int) -> None:
        """Drop every copy in memory of the last `count` pages of `node`, a leaf, and the pages themselves.

        A host copy that is being written to the store is an orphan from now on: its slot is freed when that has ended.
        """
        ids = as_ids(self.tree.truncate(node, count))
        table = self.table
        self.leave_device(ids[table.device_slots.take(ids) != NOWHERE])
        busy = table.host_busys.take(ids) != 0
        self.orphans.update(ids[busy].tolist())
        self._forget_rows(ids[~busy])
        if self.events is not None:
            self.events.forget(ids.tolist())

    def forget_orphans(self, ids: Ids) -> None:
        """Free those of these pages that were forgotten while they were written to the store, which has ended."""
        gone = self.orphans.intersection(ids.tolist())
        self.orphans -= gone
        self._forget_rows(np.array(sorted(gone), np.int32))

    def _forget_rows(self, ids: Ids) -> None:
        self.leave_host(ids[self.table.host_slots.take(ids) != NOWHERE])
        self.table.release(ids.tolist())

    @staticmethod
    def idle_tail(busy: array[int], pages: array[int], end: int, most: int) -> int:
        """How many of pages[:end], from the end on and at most `most`, are idle by a busy column of the table."""
        count = 0
        while count < most and count < end and not busy[pages[end - 1 - count]]:
            count += 1
        return count
