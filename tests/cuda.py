"""What tests that need a GPU are marked with."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

__all__ = ["needs_cuda", "needs_flashinfer"]

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]
needs_flashinfer = [*needs_cuda, pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")]
