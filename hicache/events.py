"""Placement events: which pages can be found in which tier of memory, for routers that follow a fleet of caches.

A page is announced in a tier after its bytes have landed there, parents first, and removed from each tier when its copy goes.
The disk tier is not announced: what a store evicts for itself, or another process in it, would have to be, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.base import PageRef

__all__ = ["PageEvents", "PageRemoved", "PageStored", "Tier"]

Tier = Literal["device", "host"]


class PageStored(NamedTuple):
    """A page can be found in `tier` from now on."""

    ref: PageRef
    tier: Tier


class PageRemoved(NamedTuple):
    """A page can't be found in `tier` any more."""

    key: bytes
    tier: Tier


class PageEvents:
    """Collects events until somebody takes them. Owned by the scheduler thread."""

    def __init__(self) -> None:
        self._refs: dict[int, PageRef] = {}
        self._tiers: dict[int, set[Tier]] = {}
        self._out: list[PageStored | PageRemoved] = []

    def introduce(self, ids: Sequence[int], refs: Sequence[PageRef]) -> None:
        """Say what logical pages stand for, before anything lands for them."""
        for page, ref in zip(ids, refs, strict=True):
            self._refs[page] = ref
            self._tiers[page] = set()

    def landed(self, ids: Sequence[int], tier: Tier) -> None:
        """The pages' bytes are in `tier` now."""
        for page in ids:
            self._tiers[page].add(tier)
            self._out.append(PageStored(self._refs[page], tier))

    def left(self, ids: Sequence[int], tier: Tier) -> None:
        """The pages' copies in `tier` are gone. Pages that are forgotten already were announced as gone then."""
        for page in ids:
            if tier in self._tiers.get(page, ()):
                self._tiers[page].remove(tier)
                self._out.append(PageRemoved(self._refs[page].key, tier))

    def forget(self, ids: Sequence[int]) -> None:
        """The pages have left the tree: they can't be found, even if a copy is still being read."""
        for page in ids:
            ref = self._refs.pop(page)
            self._out += [PageRemoved(ref.key, tier) for tier in sorted(self._tiers.pop(page))]

    def take(self) -> list[PageStored | PageRemoved]:
        """Events since the last call, in order."""
        out, self._out = self._out, []
        return out
