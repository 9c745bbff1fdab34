"""Page-locks host memory for a GPU, so that its copy engines and kernels reach it without the processor's help."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hicache.host_memory import address_of

if TYPE_CHECKING:
    import mmap

__all__ = ["CudaRegistrar", "Registrar", "node_of", "pin", "unpin"]

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0
_PORTABLE_AND_MAPPED = 3


class Registrar(Protocol):
    """Page-locks and releases ranges of addresses."""

    def register(self, address: int, num_bytes: int) -> None:
        """Lock a range. Raises OSError."""
        ...

    def unregister(self, address: int) -> None:
        """Release a range that was locked, given where it begins. Raises OSError."""
        ...


class CudaRegistrar:
    """The CUDA runtime's. Making one raises OSError where there is no CUDA."""

    def __init__(self) -> None:
        try:
            self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            raise OSError(f"no CUDA runtime: {error}") from error

    def register(self, address: int, num_bytes: int) -> None:
        """Lock a range for all contexts, and map it into the device's addresses."""
        self._check(self._cudart.cudaHostRegister(address, num_bytes, _PORTABLE_AND_MAPPED))

    def unregister(self, address: int) -> None:
        """Release a range."""
        self._check(self._cudart.cudaHostUnregister(address))

    def _check(self, code: Any) -> None:
        if int(code) == 0:
            return
        with contextlib.suppress(RuntimeError):  # CUDA remembers the error, and would tell the next launch, whosever it is
            torch.zeros(1, device="cuda")
        raise OSError(f"{self._cudart.cudaGetErrorString(code)} (CUDA error {int(code)})")


def pin(memory: mmap.mmap, chunk_bytes: int, registrar: Registrar) -> list[int]:
    """Page-lock a mapping in chunks, all of it or nothing; returns where the chunks begin. Raises OSError.

    The caller calls `unpin` before the memory goes. Says every few seconds how far it is.
    """
    base, size = address_of(memory), len(memory)
    chunks: list[int] = []
    said_s = time.monotonic()
    for at in range(0, size, chunk_bytes):
        try:
            registrar.register(base + at, min(chunk_bytes, size - at))
        except OSError:
            unpin(chunks, registrar)
            raise
        chunks.append(base + at)
        if time.monotonic() - said_s > PROGRESS_S:
            said_s = time.monotonic()
            logger.info("page-locking the host pool: %.0f of %.0f GiB", (at + chunk_bytes) / 2**30, size / 2**30)
    return chunks


def unpin(chunks: list[int], registrar: Registrar) -> None:
    """Release what `pin` locked; what can't be released (the device is gone) is left to the end of the process."""
    for address in chunks:
        with contextlib.suppress(OSError):
            registrar.unregister(address)


def node_of(device: torch.device) -> int | None:
    """The NUMA node that a GPU hangs on; None if the machine doesn't say."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int(Path(f"/sys/bus/pci/devices/{place}/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None
