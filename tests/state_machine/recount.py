"""Recounts a cache from scratch and compares: what must hold between any two calls."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from hicache.lease import LeaseState
from hicache.page_table import NOWHERE
from hicache.radix_tree import FEW
from hicache.transfer.operation import CopyOp, OpKind, PrefetchOp, StoreOp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.radix_tree import Node
    from tests.state_machine.rig import Client, Rig


def recount(rig: Rig, clients: list[Client]) -> None:
    """Check every invariant of the cache. `clients`: those whose leases are not released."""
    _tree(rig, clients)
    _slots(rig, clients)
    _in_flight(rig)
    _bytes(rig)
    _quota(rig, clients)
    _orders(rig)


def _tree(rig: Rig, clients: list[Client]) -> None:
    """Device residency is prefix-closed, every page is somewhere, the tree's totals and users equal a recount."""
    tree, table = rig.cache._t.tree, rig.cache._t.table
    pins = Counter(client.lease.node for client in clients)
    pins.update(client.lease.prefetch.pinned for client in clients if client.lease.prefetch is not None)
    device = host_only = pinned = extra = 0
    for node in tree.nodes():
        parent, kids = node.parent, node.child_list()
        assert parent is not None
        assert len(node.pages) > 0
        assert len(node.key) == len(node.pages) * tree.page_key_bytes
        assert len(node.hashes) <= len(node.pages) * tree.key_bytes
        assert all(kid.parent is node for kid in kids)
        assert len({bytes(kid.key[: tree.page_key_bytes]) for kid in kids}) == len(kids)
        assert isinstance(node.children, dict) == (len(kids) > FEW)
        assert not node.device_len or parent.device_len == len(parent.pages), "device residency is not prefix-closed"
        for at, page in enumerate(node.pages):
            assert (table.device_slot[page] != NOWHERE) == (at < node.device_len), "the tree and the table disagree"
            assert at < node.device_len or table.host_slot[page] != NOWHERE, "a page is nowhere"
        assert node.device_children == sum(kid.device_len > 0 for kid in kids)
        spare = node.users - pins[node] - sum(kid.users > 0 for kid in kids)
        assert spare >= 0, "a node has fewer users than pins"
        extra += spare
        device += node.device_len
        host_only += node.host_len
        pinned += node.device_len if node.users else 0
    loads = sum(op.kind is OpKind.LOAD_BACK for op in rig.unsettled)
    assert extra == loads, "pins are neither a lease's, a prefetch's nor a load's"
    assert (tree.device_pages, tree.host_only_pages, tree.pinned_device_pages) == (device, host_only, pinned)
    assert table.used == device + host_only + len(rig.cache._t.orphans)
    held = Counter(client.lease.root for client in clients)
    for root in tree.roots.values():
        assert root.users == held[root]
        assert root.users or root.children, "a bare root that nobody holds"


def _slots(rig: Rig, clients: list[Client]) -> None:
    """Free + owned = capacity; each owned slot has one owner: a page, a lease, or the operation that writes it."""
    t = rig.cache._t
    ids = [page for node in t.tree.nodes() for page in node.pages]
    on_device = [t.table.device_slot[page] for page in ids if t.table.device_slot[page] != NOWHERE]
    on_host = [t.table.host_slot[page] for page in ids if t.table.host_slot[page] != NOWHERE]
    for client in clients:
        lease = client.lease
        on_device += lease.slots[lease.shared : lease.num_slots].tolist()
        if lease.state is LeaseState.ACTIVE and lease.node is not None:
            path = t.tree.path_ids(lease.node)
            assert len(path) == lease.shared, "a lease's node is not where its shared pages end"
            there = lease.shared - (0 if lease.load is None else len(lease.load.ids))  # the others have not landed
            assert (t.table.device_slots[path[:there]] == lease.slots[:there]).all()
            assert lease.load is None or (lease.load.dst == lease.slots[there : lease.shared]).all()
        if lease.prefetch is not None:
            on_host += [slot for slots, _ in lease.prefetch.early.values() for slot in slots.tolist()]
        if lease.prefetch is not None and lease.prefetch.back is not None:
            back = lease.prefetch.back
            on_host += back.slots.tolist()
            on_host += [slot for batch in back._early.values() for slot in batch.slots.tolist()]
            assert len(back.slots) in (0, back.end - back.first)
    assert not t.orphans & set(ids)
    on_host += [t.table.host_slot[page] for page in t.orphans]
    for op in rig.unsettled:
        if isinstance(op, CopyOp):
            (on_host if op.kind is OpKind.BACKUP else on_device).extend(op.dst.tolist())
        elif isinstance(op, PrefetchOp):
            on_host += op.slots.tolist()
    for pool, owned in ((t.device, on_device), (t.host, on_host)):
        assert len(set(owned)) == len(owned), "a slot has two owners"
        assert pool.owned == len(owned), "a slot is owned by nobody"
        assert pool.free + pool.owned == pool.capacity
    both = {page for page in ids if t.table.device_slot[page] != NOWHERE and t.table.host_slot[page] != NOWHERE}
    assert set(t.mirrors) == both


def _in_flight(rig: Rig) -> None:
    """What is in flight is held, in the tree, and counted."""
    t = rig.cache._t
    device_busy: Counter[int] = Counter()
    host_busy: Counter[int] = Counter()
    loading: set[int] = set()
    for op in rig.unsettled:
        if isinstance(op, StoreOp):
            host_busy.update(op.ids.tolist())
            assert (t.table.host_slots[op.ids] == op.slots).all(), "a page left the slot that a write to the store reads"
        elif isinstance(op, CopyOp):
            (device_busy if op.kind is OpKind.BACKUP else host_busy).update(op.ids.tolist())
            if op.kind is OpKind.LOAD_BACK:
                loading |= set(op.ids.tolist())
            source = t.table.device_slots if op.kind is OpKind.BACKUP else t.table.host_slots
            assert (source[op.ids] == op.src).all(), "a page left the slot that a copy of it reads"
    assert device_busy == _counts(t.table.device_busys)
    assert host_busy == _counts(t.table.host_busys)
    assert loading == set(np.flatnonzero(t.table.loading).tolist())
    in_tree = {page for node in t.tree.nodes() for page in node.pages}
    assert set(device_busy) | set(host_busy) <= in_tree | t.orphans, "a page was forgotten while in flight"
    assert t.orphans <= {page for op in rig.unsettled if isinstance(op, StoreOp) for page in op.ids.tolist()}
    assert t.in_flight == len(rig.unsettled)
    assert t.copying == sum(isinstance(op, CopyOp) for op in rig.unsettled)
    assert set(t.storing) == {op for op in rig.unsettled if isinstance(op, StoreOp)}
    backing = sum(len(op.ids) for op in rig.unsettled if isinstance(op, CopyOp) and op.kind is OpKind.BACKUP)
    storing = sum(len(op.ids) for op in rig.unsettled if isinstance(op, StoreOp))
    assert 0 <= t.coming_device <= backing
    assert 0 <= t.coming_host <= storing


def _counts(column: np.ndarray) -> dict[int, int]:
    return {int(i): int(column[i]) for i in np.flatnonzero(column)}


def _bytes(rig: Rig) -> None:
    """Every copy of every page holds what its prefix says."""
    t = rig.cache._t
    pools = (
        (t.table.device_slot, rig.device.data.numpy()),
        (t.table.host_slot, rig.host.data if rig.host is not None else None),
    )
    for salt, node, tokens, above in _walk(rig):
        for at, page in enumerate(node.pages):
            want = rig.bytes_of(salt, tokens[: above + (at + 1) * rig.page_size])
            for column, data in pools:
                if column[page] != NOWHERE:
                    assert data is not None
                    assert (data[column[page]] == want).all(), "a page holds another page's bytes"


def _walk(rig: Rig) -> Iterable[tuple[str, Node, tuple[int, ...], int]]:
    for root in rig.cache._t.tree.roots.values():
        stack: list[tuple[Node, tuple[int, ...]]] = [(child, ()) for child in root.child_list()]
        while stack:
            node, above = stack.pop()
            tokens = above + tuple(np.frombuffer(bytes(node.key), np.int32).tolist())
            yield rig.salts[root.hashes], node, tokens, len(above)
            stack += [(child, tokens) for child in node.child_list()]


def _quota(rig: Rig, clients: list[Client]) -> None:
    """The prefetch quota is what waiting leases hold of it."""
    prefetcher = rig.cache._prefetcher
    held = [client.lease.prefetch.quota_pages for client in clients if client.lease.prefetch is not None]
    assert prefetcher.quota_used == sum(held)
    assert 0 <= prefetcher.quota_used <= prefetcher.quota_pages
    for client in clients:
        if client.lease.state is not LeaseState.WAITING and (prefetch := client.lease.prefetch) is not None:
            assert prefetch.back is not None, "a running lease waits for what is read first to last"
            assert prefetch.pinned is None


def _orders(rig: Rig) -> None:
    """Each tier's order lists exactly the leaves that nobody uses."""
    tree = rig.cache._t.tree
    nodes = [node for node in tree.nodes() if not node.users]
    device = {node for node in nodes if node.device_len and not any(kid.device_len for kid in node.child_list())}
    host = {node for node in nodes if not node.children and node.host_len}
    assert set(tree.device_order) == device
    assert set(tree.host_order) == host
