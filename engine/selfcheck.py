"""Try a loaded model once on pages: what a neighbour computes must not show.

The probe sees attention calls only. A model that also mixes tokens elsewhere (a convolution, recurrent state, positions taken
from the row and not from `position_ids`) gives other logits when its prompt is cut in chunks beside another sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention.torch_backend import TorchBackend
from engine.batch import Batch, Chunk
from engine.runner import ModelRunner
from hicache.errors import ModelRefused

if TYPE_CHECKING:
    from engine.model import LoadedModel

__all__ = ["check_isolation"]

PAGE_SIZE = 4
PROMPT, CUT, NEIGHBOUR = 11, 7, 6
TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.25
"""Relative to the norm of the logits; what this looks for is off by a multiple of it."""


def check_isolation(model: LoadedModel) -> None:
    """Compare a prompt computed alone with the same in chunks beside another. Raises ModelRefused."""
    geometry = model.geometry(PAGE_SIZE, "auto")
    pool = torch.zeros(9, geometry.page_bytes, dtype=torch.uint8, device=model.device)
    runner = ModelRunner(model, TorchBackend(pool, geometry, model.layers, model.dtype))
    tokens = np.arange(1, 1 + PROMPT + NEIGHBOUR) * 7 % min(model.vocab_size, 1000)
    prompt, other = tokens[:PROMPT], tokens[PROMPT:]
    pages = np.array([6, 1, 8, 3, 0, 4, 2, 7, 5], np.int32)
    alone = runner.forward(Batch([Chunk(prompt, 0, pages[:3])]))[0]
    runner.forward(Batch([Chunk(other, 0, pages[6:]), Chunk(prompt[:CUT], 0, pages[3:6])]))
    beside = runner.forward(Batch([Chunk(other[:1], NEIGHBOUR, pages[6:]), Chunk(prompt[CUT:], CUT, pages[3:6])]))[1]
    difference = float((alone - beside).norm() / alone.norm())
    if not difference <= TOLERANCE.get(model.dtype, HALF_TOLERANCE):
        raise ModelRefused(
            f"{type(model.hf).__name__} gives other logits when a prompt is computed in chunks beside another "
            f"(relative difference {difference:.2g}), so it can't share a batch or reuse KV"
        )
