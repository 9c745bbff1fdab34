"""Triton kernels in tests: compiled where there is a GPU, otherwise in Triton's interpreter, on pools in CPU memory."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.transfer.io_backend import IoBackend, Move, Part

__all__ = ["interpreted_kernels"]

_LOCK = threading.Lock()


class _OneAtATime:
    """An IoBackend whose copies of both directions take turns: Triton's interpreter is one for the whole process."""

    def __init__(self, backend: IoBackend) -> None:
        self._backend = backend

    def copy(self, move: Move, parts: Sequence[Part]) -> Iterator[Part]:
        copied = self._backend.copy(move, parts)
        while True:
            with _LOCK:
                part = next(copied, None)
            if part is None:
                return
            yield part


def interpreted_kernels() -> IoBackend:
    """A KernelBackend in the interpreter; skips the test where it can't be had."""
    pytest.importorskip("triton", reason="needs Triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled on this machine, where the cases for a GPU test them")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read when a kernel is defined
        module = importlib.import_module("hicache.transfer.gather_kernel")
    return _OneAtATime(module.KernelBackend(torch.device("cpu")))
