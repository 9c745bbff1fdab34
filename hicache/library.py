"""Puts a cache together from its parts, for whoever drives it without the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache.cache import HiCache
from hicache.pools import DevicePool, HostPool
from hicache.transfer.copier import ThreadCopier

if TYPE_CHECKING:
    from hicache.config import CacheConfig
    from hicache.geometry import PageGeometry
    from storage.base import PageStore

__all__ = ["OpenCache", "open_cache"]


class OpenCache(NamedTuple):
    """A cache and the device memory that its leases' slots number."""

    cache: HiCache
    device: DevicePool


def open_cache(config: CacheConfig, geometry: PageGeometry, *, store: PageStore | None = None) -> OpenCache:
    """Allocate pools in CPU memory and open a cache over them. The store remains the caller's to close, after the cache.

    Raises ConfigError if there is no memory for the pools.
    """
    device = DevicePool(config.device_pages, geometry.page_bytes)
    if config.host_pages == 0:
        return OpenCache(HiCache(config, geometry), device)
    host = HostPool(config.host_pages, geometry.page_bytes)
    cache = HiCache(
        config, geometry, make_copier=lambda completions: ThreadCopier(device, host, completions), host=host, store=store
    )
    return OpenCache(cache, device)
