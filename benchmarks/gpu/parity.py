"""The engine's logits beside transformers' own, both in bf16, each against transformers in fp32 with the same weights.

A prompt is computed in chunks beside another, then decoded token by token, through pages and (where there are any) graphs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.common import device_option
from benchmarks.gpu.figures import Figure, emit
from engine.attention.choose import make_backend
from engine.batch import Batch, Chunk
from engine.graphs import CudaCapture
from engine.model import load_model
from engine.runner import ModelRunner
from tests.models import make_tiny_model

FAMILIES: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {},
    "gemma2": {},
    "gpt_oss": {"num_experts_per_tok": 4},  # all experts: which few are chosen hangs on the last bit
}
SHAPE = {"head_dim": 128, "hidden_size": 256, "intermediate_size": 512}
PAGE_SIZE, PROMPT, ANSWER = 16, 90, 12
WORSE = 1.25
"""How much larger than transformers' own error in bf16 ours may be: rounding differs with the order of sums."""


def main() -> None:
    """Compare each family."""
    device = device_option()
    for family, others in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = make_tiny_model(family, Path(folder) / family, **SHAPE, **others)
            backend, graphs, ours, theirs = compare(path, device)
        raw = {"attention_backend": backend, "graphs": graphs, "ours": ours, "transformers": theirs}
        emit(Figure("parity", f"{family} ({backend}): error against transformers' own", ours / theirs, "x", WORSE, raw=raw))


@torch.inference_mode()
def compare(path: Path, device: torch.device) -> tuple[str, bool, float, float]:
    """Return the backend, whether graphs were used, and the relative errors of both in bf16 against fp32."""
    tokens = np.random.default_rng(3).integers(3, 259, PROMPT + ANSWER)
    exact = _transformers(path, tokens, torch.float32, device)
    theirs = _transformers(path, tokens, torch.bfloat16, device)
    model = load_model(str(path), "bfloat16", device.type)
    geometry = model.geometry(PAGE_SIZE)
    pool = torch.zeros(32 + 1, geometry.page_bytes, dtype=torch.uint8, device=device)
    backend = make_backend("auto", pool, geometry, model.layers, model.dtype)
    runner = ModelRunner(model, backend)
    if device.type == "cuda":
        runner.capture_decodes([2], 32, 16, CudaCapture())
    ours = _ours(runner, tokens)
    return backend.name, runner.has_graphs, _error(ours, exact), _error(theirs, exact)


def _transformers(path: Path, tokens: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype)
    model = loaded.to(device).eval()
    logits: torch.Tensor = model(torch.from_numpy(tokens)[None].to(device)).logits[0, PROMPT - 1 : -1].float()
    return logits


def _ours(runner: ModelRunner, tokens: np.ndarray) -> torch.Tensor:
    """Logits at the positions that transformers gave them at."""
    order = np.random.default_rng(4).permutation(32).astype(np.int32)
    pages, others = order[:16], order[16:]
    cut = PROMPT // 2 + 3
    runner.forward(Batch([Chunk(tokens[:cut], 0, pages), Chunk(tokens[:20], 0, others)]))
    rows = [runner.forward(Batch([Chunk(tokens[20:21], 20, others), Chunk(tokens[cut:PROMPT], cut, pages)]))[1].clone()]
    for at in range(PROMPT, PROMPT + ANSWER - 1):
        beside = at - PROMPT + 21
        batch = Batch([Chunk(tokens[at : at + 1], at, pages), Chunk(tokens[beside : beside + 1], beside, others)])
        rows.append(runner.forward(batch)[0].clone())
    return torch.stack(rows)


def _error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
