"""Errors of the cache and the engine on top of it.

HiCacheError
├── ConfigError          a flag, a file or a combination that can't work; one clear line for the user
├── ModelRefused         a model that can't be run correctly on paged KV
├── RequestRefused       bad input of one request (too long, bad parameter)
├── CacheClosed          the cache was used after close
└── LoadFailed           pages that a request was computing on already did not come

A store's own errors are `storage.errors.StoreError`. Failed asserts are our bugs, never input.
"""

from __future__ import annotations

__all__ = ["CacheClosed", "ConfigError", "HiCacheError", "LoadFailed", "ModelRefused", "RequestRefused"]


class HiCacheError(Exception):
    """Base of what hicache raises on purpose."""


class ConfigError(HiCacheError):
    """The configuration can't work; the message is for the user and fits on a line."""


class ModelRefused(HiCacheError):
    """The model can't be run correctly on paged KV; the message says why."""


class RequestRefused(HiCacheError):
    """The request can't be served as asked; the message is for the client."""


class CacheClosed(HiCacheError):
    """The cache was used after it was closed."""


class LoadFailed(HiCacheError):
    """Pages that a request was computing on while they were loaded did not come: what it computed is worth nothing."""
