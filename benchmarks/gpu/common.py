"""What the parts share: their options, models with random weights, and a clock that knows of the GPU."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from engine.attention.hook import IMPLEMENTATION
from engine.model import LoadedModel
from engine.probe import probe
from engine.tokenizer import load_tokenizer
from tests.models import make_tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["device_option", "median_s", "random_model", "seconds_of", "wait"]

LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
}
"""The shape of a decoder of eight billion parameters: 16 GB in bf16, and 128 KiB of KV a token."""
SMALL = {
    **LARGE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


def device_option() -> torch.device:
    """The device that this part was told to run on; a CPU means a rehearsal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no NVIDIA GPU")
    return device


def random_model(device: torch.device, **shape: Any) -> LoadedModel:
    """A Llama with random weights, made where it is used: large on a GPU, small elsewhere."""
    values = {**(LARGE if device.type == "cuda" else SMALL), **shape}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make_config: Any = CONFIG_MAPPING["llama"]
    make_model: Any = AutoModelForCausalLM
    config = make_config(**values, tie_word_embeddings=False)
    with device:
        torch.manual_seed(0)
        hf = make_model.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    hf = hf.to(device).eval()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_tokenizer().save_pretrained(folder)
        tokenizer = load_tokenizer(Path(folder))
    found = probe(hf)
    return LoadedModel(
        hf=hf,
        tokenizer=tokenizer,
        config=config,
        device=device,
        dtype=dtype,
        context_length=values["max_position_embeddings"],
        vocab_size=values["vocab_size"],
        eos_token_ids=frozenset(),
        weights="random",
        layers=found.layers,
        page_layers=found.pages,
    )


def wait(device: torch.device) -> None:
    """Return when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """How long a call and what it started took."""
    wait(device)
    begun_s = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - begun_s


def median_s(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """The median of several calls, after one that is not counted."""
    return statistics.median([seconds_of(run, device) for _ in range(runs + 1)][1:])
