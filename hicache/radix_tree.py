"""The radix tree: finds the pages of a token prefix. It maps tokens to logical pages and owns no memory.

Nodes hold runs of whole pages. Two facts hold at any time between calls:

    device prefix    the first `device_len` pages of a node are on the device; a child has device pages only if its parent is
                     wholly on the device. So device residency is prefix-closed, and a number a node tells it.
    reachable        every page of a node is in some memory tier, so what is reachable is prefix-closed too.

    node.pages   [0 ......... device_len ......... len)
                  on the device | only on the host

A pin protects a node and all its ancestors: `users` counts own pins plus pinned children, so pinning walks up only to the first
ancestor in use. (A root is not pinned but held, by every lease of its namespace.) On a split the lower half keeps its identity,
so handles (a node and its end) stay valid and a pin still covers all it covered. A use touches the deepest node only; what a
child's uses were worth passes to its parent when the child goes.

Ideas: RadixAttention (Zheng et al., SGLang, arXiv 2312.07104); leaf-first eviction as there.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicache.eviction import EvictionOrder, LeafOrder, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    Ids = npt.NDArray[np.int32]

__all__ = ["FEW", "Match", "Node", "RadixTree"]

FEW = 4
"""So many children are looked through one by one: for them a dict costs several times the memory and no less time."""


class Node:
    """A run of whole pages. `key`: their tokens, int32 little-endian. `hashes`: the page keys computed so far.

    children: a tuple of up to FEW, or a dict by the tokens of the child's first page, which no two have in common.
    device, host: usage in each tier's eviction order.
    """

    __slots__ = (
        "children", "device", "device_children", "device_len", "hashes", "host", "key", "pages", "parent", "users",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: bytearray, pages: array[int], tick: int, priority: int) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.hashes = b""
        self.children: tuple[Node, ...] | dict[bytes, Node] = ()
        self.device_len = 0
        self.device_children = 0
        self.users = 0
        self.device = Usage(tick, 0, priority)
        self.host = Usage(tick, 0, priority)

    def __len__(self) -> int:
        return len(self.pages)

    def __bool__(self) -> bool:
        return True

    @property
    def host_len(self) -> int:
        """Pages that are only on the host."""
        return len(self.pages) - self.device_len

    def child_list(self) -> list[Node]:
        """All children."""
        kids = self.children
        return list(kids.values() if isinstance(kids, dict) else kids)


class Match(NamedTuple):
    """Where a look-up ended: `depth` pages of `node` belong to it; `pages` below the start in all, `device` of them there."""

    node: Node
    depth: int
    pages: int
    device: int


class RadixTree:
    """Finds, inserts, splits, and keeps each tier's leaves in eviction order. Owned by the scheduler thread.

    The caller owns tiers and table: the tree is told what moved (`promote`, `demote`, `truncate`) and never moves anything.
    """

    def __init__(
        self,
        page_size: int,
        policy: str = "lru",
        key_bytes: int = 16,
        make_order: Callable[[], LeafOrder[Node]] | None = None,
    ) -> None:
        """Build an empty tree. make_order: makes each tier's order where no plain policy will do."""
        self.key_bytes = key_bytes  # of a page key, not of its tokens
        self.page_size = page_size
        self.page_key_bytes = 4 * page_size
        self.roots: dict[bytes, Node] = {}
        make = make_order or (lambda: EvictionOrder(policy))
        self.device_order: LeafOrder[Node] = make()
        self.host_order: LeafOrder[Node] = make()
        self.now = 0  # least tick of the next use; set by who wants ticks to be times
        self.device_pages = 0
        self.host_only_pages = 0
        self.pinned_device_pages = 0
        self._moves_on_use = self.device_order.moves_on_use
        self._tick = 0

    # ---- look-up

    def hold_root(self, key: bytes) -> Node:
        """The root of a namespace, made if need be and kept until `drop_root`. `key` is the namespace's root key."""
        root = self.roots.get(key)
        if root is None:
            root = self.roots[key] = Node(None, bytearray(), array("i"), 0, 0)
            root.hashes = key
        root.users += 1
        return root

    def drop_root(self, root: Node) -> None:
        """Undo one `hold_root`; a root that nobody holds and that has no pages is gone."""
        root.users -= 1
        self._forget_bare_root(root)

    def holds(self, root: Node) -> bool:
        """Whether a root is one of this tree's."""
        return self.roots.get(root.hashes) is root

    def rename_root(self, key: bytes, new: bytes) -> None:
        """Give a root another key of the same length; unknown keys are ignored."""
        if (root := self.roots.pop(key, None)) is not None:
            root.hashes = new
            self.roots[new] = root

    def _forget_bare_root(self, root: Node) -> None:
        if not root.users and not root.children:
            del self.roots[root.hashes]

    def match(self, start: Node, tokens: bytes | bytearray, end: int, at: int = 0) -> Match:
        """Walk down from the end of `start` along tokens[at:end] (byte offsets, page-aligned). Changes nothing."""
        page = self.page_key_bytes
        node, depth, o = start, len(start.pages), at
        while o < end:
            kids = node.children
            if isinstance(kids, dict):
                kid = kids.get(bytes(tokens[o : o + page]))
                kids = () if kid is None else (kid,)
            for child in kids:
                if tokens.startswith(child.key, o, end):
                    node, depth = child, len(child.pages)
                    o += len(child.key)
                    break
            else:
                for child in kids:
                    if common := self._common_pages(child.key, tokens, o, end):
                        node, depth = child, common
                        o += common * page
                        break
                break
        pages = (o - at) // page
        return Match(node, depth, pages, self._device_part(start, node, depth, pages))

    def _common_pages(self, key: bytearray, tokens: bytes | bytearray, o: int, end: int) -> int:
        page = self.page_key_bytes
        n = min(len(key), end - o)
        if key[:page] != tokens[o : o + page]:
            return 0
        a = np.frombuffer(bytes(key[:n]), np.int32)
        b = np.frombuffer(bytes(tokens[o : o + n]), np.int32)
        differ = a != b
        first = int(differ.argmax())
        return (first if differ[first] else len(a)) // self.page_size

    def _device_part(self, start: Node, node: Node, depth: int, pages: int) -> int:
        """Of `pages` pages below `start` that end at (node, depth), how many are on the device."""
        while node is not start:
            if node.device_len >= depth:
                return pages
            if node.device_len:
                return pages - depth + node.device_len
            pages -= depth
            node = node.parent  # type: ignore[assignment]
            depth = len(node.pages)
        return 0

    def path(self, node: Node) -> list[Node]:
        """Nodes from below the root down to `node`."""
        out = []
        while node.parent is not None:
            out.append(node)
            node = node.parent
        out.reverse()
        return out

    def path_ids(self, node: Node) -> Ids:
        """Logical page ids from the root to the end of `node`."""
        return np.frombuffer(b"".join([n.pages.tobytes() for n in self.path(node)]), np.int32)

    def ids_between(self, above: Node, node: Node) -> Ids:
        """Logical page ids from the end of `above`, an ancestor, to the end of `node`."""
        runs = []
        while node is not above:
            runs.append(node.pages.tobytes())
            node = node.parent  # type: ignore[assignment]
        return np.frombuffer(b"".join(reversed(runs)), np.int32)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = [child for root in self.roots.values() for child in root.child_list()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.child_list())

    # ---- growth

    def split(self, node: Node, depth: int) -> Node:
        """Cut `node` after `depth` pages and return the new upper half; `node` itself becomes the lower half."""
        assert 0 < depth < len(node.pages), "split inside a page run only"
        parent, cut = node.parent, depth * self.page_key_bytes
        assert parent is not None
        upper = Node(parent, node.key[:cut], node.pages[:depth], 0, 0)
        self._swap_child(parent, node, upper)
        hash_cut = depth * self.key_bytes
        upper.hashes, node.hashes = node.hashes[:hash_cut], node.hashes[hash_cut:]
        node.key, node.pages = node.key[cut:], node.pages[depth:]
        node.parent, upper.children = upper, (node,)
        upper.device_len = min(node.device_len, depth)
        node.device_len -= upper.device_len
        upper.device_children = int(node.device_len > 0)
        upper.users = int(node.users > 0)
        for mine, lower in ((upper.device, node.device), (upper.host, node.host)):
            mine.tick, mine.priority, mine.group = lower.tick, lower.priority, lower.group
        if not node.device_len:
            upper.device.hits, node.device.hits = node.device.hits, 0
        self._relist(upper)
        self._relist(node)
        return upper

    def grow(self, node: Node, key: bytes | bytearray, pages: array[int], on_device: bool, priority: int) -> Node:
        """Add pages after the end of `node`; nothing below it may begin like them. Returns the node that holds them.

        `node` grows in place if it is a leaf that nobody holds but, by one pin, the caller: so a conversation stays one node,
        and nobody else finds its end moved.
        """
        assert len(key) == len(pages) * self.page_key_bytes
        in_place = not node.children and node.parent is not None and node.users <= 1 and node.host.group >= 0
        if in_place and (not on_device or node.device_len == len(node.pages)):
            node.key += key
            node.pages += pages
            child = node
        else:
            self._tick = max(self._tick + 1, self.now)
            child = Node(node, bytearray(key), pages, self._tick, priority)
            self._add_child(node, child)
        child.device.priority = max(child.device.priority, priority)
        child.host.priority = max(child.host.priority, priority)
        self.host_only_pages += len(pages)
        self.promote(child, len(pages) if on_device else 0)
        return child

    # ---- what moved

    def promote(self, node: Node, count: int) -> None:
        """The next `count` pages of `node` are on the device now; all before them must be."""
        assert node.device_len + count <= len(node.pages)
        assert node.parent is not None
        if count:
            assert node.parent.device_len == len(node.parent.pages), "a parent is on the device before its child"
            if node.device_len == 0:
                node.parent.device_children += 1
                self._relist(node.parent)
            node.device_len += count
            self.device_pages += count
            self.host_only_pages -= count
            if node.users:
                self.pinned_device_pages += count
        self._relist(node)

    def demote(self, node: Node, count: int) -> None:
        """The last `count` device pages of `node` are only on the host now."""
        assert count <= node.device_len
        self._shrink_device(node, count)
        self.host_only_pages += count
        self._relist(node)

    def truncate(self, node: Node, count: int) -> array[int]:
        """Forget the last `count` pages of `node`, which has no children, and return their ids.

        An emptied node leaves the tree.
        """
        assert not node.children
        assert not node.users, "a pinned node is never cut"
        keep = len(node.pages) - count
        node.host.ends = False
        on_device = max(0, node.device_len - keep)
        self.host_only_pages -= count - on_device
        self._shrink_device(node, on_device)
        if keep:
            gone = node.pages[keep:]
            del node.pages[keep:]
            del node.key[keep * self.page_key_bytes :]
            node.hashes = node.hashes[: keep * self.key_bytes]
            self._relist(node)
            return gone
        self._unlink(node)
        return node.pages

    def _shrink_device(self, node: Node, count: int) -> None:
        if count == 0:
            return
        node.device_len -= count
        node.device.ends = False
        self.device_pages -= count
        if node.users:
            self.pinned_device_pages -= count
        if node.device_len == 0:
            parent = node.parent
            assert parent is not None
            parent.device_children -= 1
            parent.device.absorb(node.device, recency=self._moves_on_use)
            self._relist(parent)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        self.device_order.discard(node)
        self.host_order.discard(node)
        self._drop_child(parent, node)
        node.parent = None
        parent.host.absorb(node.host, recency=self._moves_on_use)
        if parent.parent is None:
            self._forget_bare_root(parent)
        self._relist(parent)

    # ---- use

    def touch(self, node: Node, priority: int, hits: int = 1, group: int = 0) -> None:
        """Note a use of all pages up to `node`: in each tier the deepest node counts it for its ancestors.

        hits: 0 for what only refreshes recency, such as the end of a request whose start was counted.
        """
        self._tick = max(self._tick + 1, self.now)
        node.host.group = group
        self._use(node, node.host, self.host_order, priority, hits)
        while node.parent is not None and not node.device_len:
            node = node.parent
        node.device.group = group
        self._use(node, node.device, self.device_order, priority, hits)

    def _use(self, node: Node, usage: Usage, order: LeafOrder[Node], priority: int, hits: int) -> None:
        if self._moves_on_use:
            usage.tick = self._tick
        usage.hits += hits
        usage.priority = max(usage.priority, priority)
        if node in order:
            order.add(node, usage)

    def regroup(self, node: Node, group: int) -> None:
        """Note that a leaf is of another group than its last use said."""
        for usage, order in ((node.host, self.host_order), (node.device, self.device_order)):
            usage.group = group
            if node in order:
                order.add(node, usage)

    def pin(self, node: Node) -> None:
        """Protect `node` and its ancestors from eviction in every tier until `unpin`."""
        while node.parent is not None:
            node.users += 1
            if node.users > 1:
                return
            self.pinned_device_pages += node.device_len
            self.device_order.discard(node)
            self.host_order.discard(node)
            node = node.parent

    def unpin(self, node: Node) -> None:
        """Undo one `pin` of the same node."""
        while node.parent is not None:
            node.users -= 1
            assert node.users >= 0, "unpinned more often than pinned"
            if node.users:
                return
            self.pinned_device_pages -= node.device_len
            self._relist(node)
            node = node.parent

    # ---- helpers

    def _relist(self, node: Node) -> None:
        """Put a node where it belongs in each tier's order, or take it out."""
        if node.users or node.parent is None:
            return
        if node.device_len and not node.device_children:
            self.device_order.add(node, node.device)
        else:
            self.device_order.discard(node)
        if not node.children and node.device_len < len(node.pages):
            self.host_order.add(node, node.host)
        else:
            self.host_order.discard(node)

    def _first_page(self, node: Node) -> bytes:
        return bytes(node.key[: self.page_key_bytes])

    def _add_child(self, parent: Node, child: Node) -> None:
        kids = parent.children
        if isinstance(kids, dict):
            kids[self._first_page(child)] = child
        elif len(kids) < FEW:
            parent.children = (*kids, child)
        else:
            parent.children = {self._first_page(kid): kid for kid in (*kids, child)}
        self._relist(parent)

    def _swap_child(self, parent: Node, old: Node, new: Node) -> None:
        kids = parent.children
        if isinstance(kids, dict):
            kids[self._first_page(new)] = new
        else:
            parent.children = tuple(new if kid is old else kid for kid in kids)

    def _drop_child(self, parent: Node, child: Node) -> None:
        kids = parent.children
        if isinstance(kids, dict):
            del kids[self._first_page(child)]
            if len(kids) <= FEW:
                parent.children = tuple(kids.values())
        else:
            parent.children = tuple(kid for kid in kids if kid is not child)
