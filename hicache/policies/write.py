"""Write policies: when a page gets a copy in the tier below. What happens when a tier needs room is in `hicache.reclaim`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hicache.config import CacheConfig

__all__ = ["WriteRules", "write_rules"]


class WriteRules(NamedTuple):
    """One write policy, as what it does.

    backup_hits: a page is copied to the host once it was used this often (being computed is the first use); None: only when the
        device needs room.
    stores_at_once: the host copy goes on to disk as soon as it has landed; else only when the host needs room.
    keep_hits: a page without a lower copy that must leave the device is copied down first if used this often, else dropped.
    store_hits: a page goes on to disk only if used this often.
    in_background: room is made ahead of need, between two watermarks, so that the scheduler does not wait for copies.
    """

    backup_hits: int | None
    stores_at_once: bool
    keep_hits: int
    store_hits: int
    in_background: bool

    @property
    def counts_uses(self) -> bool:
        """Whether it matters how often a page was used before it was evicted."""
        return max(self.backup_hits or 0, self.keep_hits, self.store_hits) > 1


def write_rules(config: CacheConfig) -> WriteRules:
    """The rules of the configured policy."""
    store_hits = {"all": 0, "second-sight": 2}[config.storage_admission]
    match config.write_policy:
        case "write_through":
            return WriteRules(1, True, 1, store_hits, in_background=False)
        case "write_through_selective":
            threshold = config.hit_threshold
            return WriteRules(threshold, True, threshold, store_hits, in_background=False)
        case "write_back":
            return WriteRules(None, False, 1, store_hits, in_background=True)
