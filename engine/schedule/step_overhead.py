"""What a decode step costs apart from the model: a real engine on a tiny model, each part timed where it is called."""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.config import ServeConfig
from engine.core import EngineCore
from engine.messages import GenerateRequest, SamplingParams, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Part", "measure"]

BATCH, PROMPT_TOKENS, STEPS = 8, 1024, 400
VOCAB = 49_152


class Part(NamedTuple):
    """Wall time of a part of a step."""

    name: str
    median_us: float
    p99_us: float


def measure() -> Iterator[Part]:
    """Decode with 8 sequences of 1,024 tokens, greedy, on a model of one layer with the vocabulary of a real one."""
    with tempfile.TemporaryDirectory() as folder:
        config = ServeConfig(model_path=str(_tiny_model(Path(folder))), device="cpu", max_total_tokens=32_768)
        core = EngineCore(config)
        try:
            for number in range(BATCH):
                tokens = np.random.default_rng(number).integers(3, VOCAB, PROMPT_TOKENS).tolist()
                sampling = SamplingParams(max_new_tokens=10_000, temperature=0, ignore_eos=True)
                assert core.add(GenerateRequest(str(number), tokens, sampling)) is None
            yield from _time_steps(core)
        finally:
            core.fail_all("measured", 503)
            core.close(0.0)


def _time_steps(core: EngineCore) -> Iterator[Part]:
    parts: dict[str, list[float]] = {}
    for name, owner, method in (
        ("cache.poll", core.cache, "poll"),
        ("scheduler.schedule", core._scheduler, "schedule"),
        ("model (not counted)", core._runner, "forward"),
        ("scheduler.computed", core._scheduler, "computed"),
        ("sampler.sample", core._sampler, "sample"),
    ):
        setattr(owner, method, _timed(getattr(owner, method), parts.setdefault(name, [])))
    for _ in range(BATCH + 20):
        core.step()
    for times in parts.values():
        times.clear()
    gc.collect()
    gc.freeze()
    whole, encoding = [], []
    for _ in range(STEPS):
        started = time.perf_counter()
        out = core.step()
        between = time.perf_counter()
        for message in out or ():
            encode(message)
        whole.append((between - started) * 1e6)
        encoding.append((time.perf_counter() - between) * 1e6)
    gc.unfreeze()
    for name, times in parts.items():
        yield _part(name, np.array(times))
    model = np.array(parts["model (not counted)"])
    known = np.sum([np.array(times) for times in parts.values()], axis=0)
    yield _part("the rest of core.step", np.array(whole) - known)
    yield _part("encoding of the messages", np.array(encoding))
    yield _part("all but the model", np.array(whole) - model + np.array(encoding))


def _timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            times.append((time.perf_counter() - started) * 1e6)

    return run


def _part(name: str, times: np.ndarray) -> Part:
    return Part(name, float(np.median(times)), float(np.percentile(times, 99)))


def _tiny_model(folder: Path) -> Path:
    """Save a random Llama of one narrow layer, with a tokenizer that nobody will use."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
