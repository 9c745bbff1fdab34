"""A hierarchical KV cache: pages of KV on the device, in host memory and in a store, found by token prefix.

What a user of the library needs is exported here, loaded when it is first asked for, since some of it loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.cache import HiCache
    from hicache.config import CacheConfig, PrefetchConfig
    from hicache.errors import CacheClosed, ConfigError, HiCacheError
    from hicache.geometry import LayerGeometry, PageGeometry
    from hicache.keys import Namespace
    from hicache.lease import Lease, LeaseState
    from hicache.library import OpenCache, open_cache
    from hicache.pools import DevicePool, HostPool

__all__ = [
    "CacheClosed",
    "CacheConfig",
    "ConfigError",
    "DevicePool",
    "HiCache",
    "HiCacheError",
    "HostPool",
    "LayerGeometry",
    "Lease",
    "LeaseState",
    "Namespace",
    "OpenCache",
    "PageGeometry",
    "PrefetchConfig",
    "open_cache",
]

_MODULES = ("errors", "geometry", "keys", "config", "lease", "pools", "cache", "library")


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in map(import_module, (f"{__name__}.{module}" for module in _MODULES)):
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
