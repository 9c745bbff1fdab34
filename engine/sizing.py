"""How large the pools are: from flags, the memory there is, and what the model takes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import ServeConfig
    from engine.model import LoadedModel
    from hicache.geometry import PageGeometry

__all__ = ["LEAST_TOKENS", "PoolSizes", "pool_sizes"]

LEAST_TOKENS = 128
"""A device pool that can't hold one request of this many tokens (or of the whole context, if that is shorter) is refused."""


class PoolSizes(NamedTuple):
    """Pages of the two upper tiers."""

    device_pages: int
    host_pages: int


def pool_sizes(config: ServeConfig, model: LoadedModel, geometry: PageGeometry) -> PoolSizes:
    """Size both pools. Raises ConfigError if one request would not fit."""
    if config.max_total_tokens is not None:
        device = config.max_total_tokens // geometry.page_size
    else:
        device = _device_bytes(config, model) // geometry.page_bytes
        device = min(device, config.max_running_requests * geometry.pages(model.context_length))
    least = min(LEAST_TOKENS, model.context_length)
    if device * geometry.page_size < least:
        raise ConfigError(
            f"the device pool holds {max(0, device) * geometry.page_size} tokens, too few for one request "
            f"({least} tokens); raise --max-total-tokens or --mem-fraction-static"
        )
    return PoolSizes(device, _host_pages(config, geometry, device))


def _device_bytes(config: ServeConfig, model: LoadedModel) -> int:
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)  # weights are loaded: what is free is measured
        return int(free - (1 - config.memory_fraction("cuda")) * total)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.hf.parameters())
    return int(config.memory_fraction("cpu") * psutil.virtual_memory().total) - weights


def _host_pages(config: ServeConfig, geometry: PageGeometry, device: int) -> int:
    if not config.enable_hierarchical_cache:
        return 0
    pages = config.hicache_size_bytes // geometry.page_bytes if config.hicache_size else int(config.hicache_ratio * device)
    if pages < 1:
        raise ConfigError("the host pool holds no page; raise --hicache-ratio or --hicache-size")
    needed, there = pages * geometry.page_bytes, psutil.virtual_memory().available
    if needed > there:
        raise ConfigError(
            f"a host pool of {needed / 2**30:.1f} GiB does not fit into {there / 2**30:.1f} GiB of free memory; "
            "lower --hicache-ratio or --hicache-size"
        )
    return pages
