"""What a CUDA graph does, on a CPU: records the operations of a function once, and repeats them on the very same memory.

As in a graph, all that Python decided is frozen (shapes, numbers, which tensors), and reading a value of the device is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["opaque", "record"]

NEEDS_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")


class _Tape(TorchDispatchMode):
    """Keeps every operation, its arguments and its results."""

    active: _Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in NEEDS_HOST:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self.steps.append(lambda: _refill(tree_leaves(results), tree_leaves(func(*args, **kwargs))))
        return results


def record(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Run once to warm up and once to record; returns what repeats it, into the same result every time."""
    run()
    tape = _Tape.active = _Tape()
    try:
        with tape:
            result = run()
    finally:
        _Tape.active = None

    def replay() -> torch.Tensor:
        for step in tape.steps:
            step()
        return result

    return replay


def opaque(run: Callable[[], None]) -> None:
    """Run what stands for one kernel: recorded as a whole, it reads its buffers anew at every repetition."""
    tape = _Tape.active
    if tape is None:
        run()
        return
    tape.steps.append(run)
    with torch.utils._python_dispatch._disable_current_modes():
        run()


def _refill(held: list[Any], new: list[Any]) -> None:
    """Put repeated results where the recorded ones are; views and results in place are there already."""
    for old, result in zip(held, new, strict=True):
        if isinstance(old, torch.Tensor) and old is not result and old.data_ptr() != result.data_ptr():
            old.copy_(result)
