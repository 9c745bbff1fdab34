"""Which attention backend a model gets: FlashInfer on a GPU where it can run it and agrees with the reference, else torch."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from engine.attention.base import LayerCall
from engine.attention.flashinfer_backend import FlashInferBackend
from engine.attention.flashinfer_kernels import FlashInferKernels, unsupported
from engine.attention.kernels import AttentionShape
from engine.attention.paged_plan import plan_tables
from engine.attention.torch_backend import TorchBackend
from engine.batch import Batch, Chunk
from hicache.errors import ConfigError
from hicache.geometry import LayerGeometry, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.attention.base import AttentionBackend, LayerSpec
    from engine.attention.kernels import Kernels

    AttentionBackendName = Literal["auto", "torch", "flashinfer"]

__all__ = ["compile_kernels", "disagreement", "make_backend"]

logger = logging.getLogger(__name__)

COMPILED_AT_ONCE = 4
"""Modules of kernels; each starts ten compilers, which take about 10 s and 0.4 GB each."""

TOLERANCE = 0.03
"""Relative to the norm of the reference's output. Rounding to bfloat16 gives 0.004, one key too many or too few above 0.1."""


def make_backend(
    name: AttentionBackendName, pool: torch.Tensor, geometry: PageGeometry, layers: Sequence[LayerSpec], dtype: torch.dtype
) -> AttentionBackend:
    """Make the backend of a pool. FlashInfer compiles its kernels when a machine sees a model's shapes for the first time.

    auto: FlashInfer on a GPU, and torch with one log line where it can't run the model. Raises ConfigError if `flashinfer` was
    asked for and can't.
    """
    if name == "torch" or (name == "auto" and pool.device.type != "cuda"):
        return TorchBackend(pool, geometry, layers, dtype)
    made = _flashinfer(pool, geometry, layers, dtype)
    if not isinstance(made, str):
        return made
    if name == "flashinfer":
        raise ConfigError(f"--attention-backend flashinfer: {made}")
    logger.warning("attention runs on torch's own operations, not on FlashInfer: %s", made)
    return TorchBackend(pool, geometry, layers, dtype)


def _flashinfer(
    pool: torch.Tensor, geometry: PageGeometry, layers: Sequence[LayerSpec], dtype: torch.dtype
) -> FlashInferBackend | str:
    """The backend, or why there is none."""
    if pool.device.type != "cuda":
        return "there is no NVIDIA GPU"
    kv_dtype: torch.dtype = getattr(torch, geometry.dtype)
    if reason := unsupported(layers, dtype, kv_dtype):
        return reason
    try:
        kernels = FlashInferKernels(pool.device)
        compile_kernels(kernels, [AttentionShape.of(layer, geometry.page_size, dtype, kv_dtype) for layer in layers])
        wrong = disagreement(kernels, geometry, layers, dtype, pool.device)
    except ImportError as error:
        return f"it can't be imported ({error}); pip install 'hicache[cuda]'"
    except Exception as error:  # whatever a compiler, a driver or a kernel may say
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return wrong or FlashInferBackend(pool, geometry, layers, dtype, kernels)


def compile_kernels(kernels: Kernels, shapes: Sequence[AttentionShape]) -> None:
    """Compile what each shape needs: planning does that where it was never done."""
    chunk = Chunk(np.zeros(1, np.int32), 0, np.zeros(1, np.int32))
    distinct = list(dict.fromkeys(shapes))
    logger.info("loading FlashInfer's kernels; they are compiled first if this machine has not done so")

    def plan(shape: AttentionShape) -> None:
        kernels.prompt().plan(plan_tables([chunk], shape.page_size, shape.window), shape)

    with ThreadPoolExecutor(COMPILED_AT_ONCE) as threads:
        list(threads.map(plan, distinct))


@torch.inference_mode()
def disagreement(
    kernels: Kernels, geometry: PageGeometry, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Compare kernels with the torch backend on a few pages, for one layer of each shape: prompts, decodes, a shared prefix.

    Returns what differs, or None.
    """
    shapes = {layer[3:]: layer for layer in reversed(layers)}
    probes = [layer._replace(layer_idx=i, pages_of=i, writes=True) for i, layer in enumerate(shapes.values())]
    size = geometry.page_size
    small = PageGeometry(size, geometry.dtype, tuple(LayerGeometry(p.kv_heads, p.k_dim, p.v_dim) for p in probes))
    pools = [torch.zeros(8, small.page_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    paged = FlashInferBackend(pools[0], small, probes, dtype, kernels)
    paged.cascade_tokens = 1
    reference = TorchBackend(pools[1], small, probes, dtype)
    generator = torch.Generator(device).manual_seed(0)
    tables = [np.array(pages, np.int32) for pages in ([5, 2, 7, 0], [5, 3, 1, 4])]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    for starts, ends in (([0], [size + 1]), ([size + 1, size], [2 * size + 1, size + 2]), ([2 * size + 1, size + 2], None)):
        stops = ends or [start + 1 for start in starts]
        chunks = [
            Chunk(np.zeros(stop - start, np.int32), start, pages)
            for start, stop, pages in zip(starts, stops, tables, strict=False)
        ]
        batch = Batch(chunks)
        paged.plan(batch if ends else paged.arrange(batch)[0])
        reference.plan(batch)
        for probe in probes:
            tokens = batch.num_tokens
            unit = 1 / (probe.scale * probe.k_dim**0.5)  # logits of about 1: large ones leave a softmax to rounding
            call = LayerCall(
                randn(tokens, probe.q_heads, probe.k_dim) * unit,
                randn(tokens, probe.kv_heads, probe.k_dim),
                randn(tokens, probe.kv_heads, probe.v_dim),
                randn(probe.q_heads) if probe.sinks else None,
            )
            got, expected = paged.attend(probe, call).float(), reference.attend(probe, call).float()
            error = float((got - expected).norm() / expected.norm())
            if not error <= TOLERANCE:
                return f"its output differs from the reference by {error:.2g} for {probe}"
    return None
