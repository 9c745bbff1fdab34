"""Compiles FlashInfer's kernels for every shape that the other parts use."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.common import device_option
from benchmarks.gpu.figures import Figure, emit
from engine.attention.choose import compile_kernels
from engine.attention.flashinfer_kernels import FlashInferKernels
from engine.attention.kernels import AttentionShape

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    AttentionShape(4, 2, 128, 16, 1.0, window, softcap, q_dtype, kv_dtype)
    for window, softcap, q_dtype, kv_dtype in (
        (None, None, BF16, BF16),
        (64, None, BF16, BF16),
        (None, 30.0, BF16, BF16),
        (64, 30.0, BF16, BF16),
        (None, None, BF16, torch.float8_e4m3fn),
        (None, None, BF16, torch.float8_e5m2),
        (None, None, FP16, FP16),
    )
]


def main() -> None:
    """Compile, or load what was compiled before."""
    device = device_option()
    if device.type != "cuda":
        return
    import flashinfer

    begun_s = time.perf_counter()
    kernels = FlashInferKernels(device)
    compile_kernels(kernels, SHAPES)
    name = torch.cuda.get_device_name(device)
    raw = {"flashinfer": flashinfer.__version__, "torch": torch.__version__, "gpu": name}
    what = f"FlashInfer {flashinfer.__version__}, {len(SHAPES)} modules"
    emit(Figure("compile", what, time.perf_counter() - begun_s, "s", raw=raw))


if __name__ == "__main__":
    main()
