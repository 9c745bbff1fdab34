"""Makes the copier for a device: threads for a CPU, streams for a GPU, copying in the way that was asked for or measured."""

from __future__ import annotations

import logging
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hicache.errors import ConfigError
from hicache.transfer.copier import ThreadCopier
from hicache.transfer.cuda import CudaCopier
from hicache.transfer.io_backend import AutoBackend, Costs, DirectBackend, IoBackend, Move, split_layers
from hicache.transfer.operation import OpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from queue import SimpleQueue

    from hicache.pools import DevicePool, HostPool
    from hicache.transfer.io_backend import IoBackendName
    from hicache.transfer.operation import Copier, Operation

__all__ = ["copier_maker", "copies_right", "measure_costs"]

logger = logging.getLogger(__name__)

TRIAL_BYTES, TRIAL_PAGES, TRIALS = 64 << 20, 256, 3


def copier_maker(
    device: DevicePool, host: HostPool, bounds: Sequence[int], io_backend: IoBackendName
) -> Callable[[SimpleQueue[Operation]], Copier]:
    """What makes the copier for these pools, given the completion queue. Raises ConfigError for a backend that can't work here.

    The pools hold nothing yet: on a GPU `auto` copies some pages to and fro. bounds: where layers begin and end in a page, in
    bytes.
    """
    if device.data.device.type == "cpu":
        if io_backend == "kernel":
            raise ConfigError("--hicache-io-backend kernel needs a GPU; on a CPU copies are direct")
        return lambda completions: ThreadCopier(device, host, completions)
    host_data = torch.from_numpy(host.data)
    backends = {
        OpKind.BACKUP: _backend(device.data, host_data, host, io_backend),
        OpKind.LOAD_BACK: _backend(host_data, device.data, host, io_backend),
    }
    return lambda completions: CudaCopier(device, host, completions, backends=backends, bounds=bounds)


def _backend(src: torch.Tensor, dst: torch.Tensor, host: HostPool, name: IoBackendName) -> IoBackend:
    direct = DirectBackend(host.chunk_pages)
    if name == "direct":
        return direct
    try:
        kernel = _kernel(host, src.device if dst.device.type == "cpu" else dst.device)
    except ConfigError as error:
        if name == "kernel":
            raise
        logger.info("copies between device and host are direct: %s", error)
        return direct
    if name == "kernel":
        return kernel
    costs = measure_costs(src, dst, direct, kernel)
    logger.info("copies from %s to %s: %s", src.device.type, dst.device.type, costs.describe(src.shape[1]))
    return AutoBackend(direct, kernel, costs)


def _kernel(host: HostPool, device: torch.device) -> IoBackend:
    if not host.pinned:
        raise ConfigError("--hicache-io-backend kernel needs page-locked host memory, which the system refused")
    try:
        from hicache.transfer.gather_kernel import KernelBackend
    except ImportError as error:
        raise ConfigError(f"--hicache-io-backend kernel needs Triton: {error}") from error
    kernel = KernelBackend(device)
    if not copies_right(kernel, host, device):
        raise ConfigError(
            "--hicache-io-backend kernel can't be used: on this machine a kernel misreads page-locked host memory"
        )
    return kernel


def copies_right(backend: IoBackend, host: HostPool, device: torch.device) -> bool:
    """Whether the first and last pages of a host pool, which may be page-locked apart, come back from a device unchanged.

    The pages are overwritten.
    """
    data = torch.from_numpy(host.data)
    ends = np.array([0, len(data) - 1], np.int32)
    there, back = np.arange(2, dtype=np.int32), ends[::-1].copy()
    want = torch.randint(256, (2, data.shape[1]), dtype=torch.uint8)
    between = torch.zeros((2, data.shape[1]), dtype=torch.uint8, device=device)
    parts = split_layers((0, data.shape[1]), 2, 0)
    data[ends.tolist()] = want
    list(backend.copy(Move(data, ends, between, there), parts))
    right = bool((between.cpu() == data[ends.tolist()]).all())
    data[ends.tolist()] = 0
    list(backend.copy(Move(between, there, data, back), parts))
    _ = between.cpu()  # ordered after the copy, and waits for it
    return right and bool((data[back.tolist()] == between.cpu()).all())


def measure_costs(src: torch.Tensor, dst: torch.Tensor, direct: IoBackend, kernel: IoBackend) -> Costs:
    """Time both backends on the first pages of two pools; those of `dst` are overwritten. Takes a fraction of a second."""
    pages = min(len(src), len(dst), TRIAL_PAGES, max(2, TRIAL_BYTES // src.shape[1]))
    forth = np.arange(pages, dtype=np.int32)
    whole, scattered = Move(src, forth, dst, forth), Move(src, forth[::-1].copy(), dst, forth)
    one_run_s, scattered_s, kernel_s = (_seconds(b, m) for b, m in ((direct, whole), (direct, scattered), (kernel, scattered)))
    run_s = max(0.0, (scattered_s - one_run_s) / max(1, pages - 1))
    return Costs(run_s, one_run_s / whole.num_bytes, kernel_s / whole.num_bytes)


def _seconds(backend: IoBackend, move: Move) -> float:
    """Median time of a copy on a stream of its own, issuing included; the first one, which may compile, is not counted."""
    device = move.src.device if move.dst.device.type == "cpu" else move.dst.device
    module: Any = torch.get_device_module(device)
    times = []
    with module.stream(module.Stream(device)):
        for _ in range(1 + TRIALS):
            begun_s = time.perf_counter()
            for _ in backend.copy(move, split_layers((0, move.src.shape[1]), len(move.src_slots), 0)):
                pass
            end = module.Event()
            end.record()
            end.synchronize()
            times.append(time.perf_counter() - begun_s)
    return statistics.median(times[1:])
