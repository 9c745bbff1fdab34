"""How large the pools are: from flags, the memory there is, and what the model takes of it."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch

from engine.attention.hook import attending
from engine.scheduler import SCORED_TOKENS
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from engine.attention.hook import HookCall
    from engine.config import ServeConfig
    from engine.model import LoadedModel
    from hicache.geometry import PageGeometry

__all__ = ["LEAST_TOKENS", "PoolSizes", "gpu_pool_bytes", "pool_sizes"]

logger = logging.getLogger(__name__)

RUNTIME_BYTES = 2 << 30
"""GPU memory left for attention's workspaces (some hundreds of MiB), captured graphs, the sampler and torch's fragmentation."""

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
    """Bytes for the device pool, the weights being loaded."""
    if model.device.type == "cuda":
        tokens = config.chunked_prefill_size + config.max_running_requests
        step = _step_bytes(model, tokens, SCORED_TOKENS + config.max_running_requests)
        torch.cuda.empty_cache()  # what torch keeps for itself would count as taken
        free, total = torch.cuda.mem_get_info(model.device)
        return gpu_pool_bytes(free, total, config.memory_fraction("cuda"), step)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.hf.parameters())
    return int(config.memory_fraction("cpu") * psutil.virtual_memory().total) - weights


def gpu_pool_bytes(free: int, total: int, fraction: float, step_bytes: int) -> int:
    """The fraction's share of what is free; less if a step would not fit beside it."""
    share = int(free - (1 - fraction) * total)
    room = free - step_bytes - RUNTIME_BYTES
    if room < share:
        logger.info("the device pool leaves %.1f GiB for a step's activations, more than its fraction", step_bytes / 2**30)
    logger.info("%.1f of %.1f GiB of GPU memory go to the device pool", max(0, min(share, room)) / 2**30, total / 2**30)
    return min(share, room)


@torch.inference_mode()
def _step_bytes(model: LoadedModel, tokens: int, rows: int) -> int:
    """GPU memory that the largest step takes besides weights and KV, measured on one. Raises ConfigError."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    positions = torch.arange(tokens, device=model.device)[None] % model.context_length
    kept = torch.arange(min(rows, tokens), device=model.device)
    keeps = "logits_to_keep" in inspect.signature(model.hf.forward).parameters
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    try:
        with attending(_no_attention):
            output = model.hf(
                input_ids=ids,
                position_ids=positions,
                attention_mask=None,
                use_cache=False,
                **({"logits_to_keep": kept} if keeps else {}),
            )
            output.logits[0, -len(kept) :].float()
    except torch.OutOfMemoryError:
        raise ConfigError(f"a step of {tokens} tokens does not fit beside the weights; lower --chunked-prefill-size") from None
    return torch.cuda.max_memory_allocated(model.device) - before


def _no_attention(call: HookCall) -> torch.Tensor:
    """Zeros in place of attention, as large."""
    return call.query.new_zeros(1, call.query.shape[2], call.query.shape[1], call.value.shape[-1])


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
