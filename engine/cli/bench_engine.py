"""`hicache bench engine` and `hicache bench overhead`: the engine beside transformers, and the cache beside no cache.

Both sides load the same model into this process and take turns, run by run, so that what else the machine does hits both.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from engine.cli.in_process import answer, ask, drain, make_core, random_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import GenerationMixin

    from engine.core import EngineCore

__all__ = ["engine", "overhead"]


DECODED = 33
"""Tokens of an answer whose decode steps are timed."""


class Figure(NamedTuple):
    """Medians of two sides of one case in seconds, and how many times quicker ours is than the other.

    best_ratio: the same of the quickest run of each side. What else a machine does only ever adds to a run, so this tells small
    differences where medians can't.
    """

    case: str
    ours_s: float
    other_s: float
    ratio: float
    best_ratio: float


def engine(
    model_path: Annotated[str, typer.Option(help="Model to run.")] = "smollm2",
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt that is computed in one step.")] = 1024,
    contexts: Annotated[str, typer.Option(help="Contexts at which decoding is timed, in tokens.")] = "128,4000",
    runs: Annotated[int, typer.Option(help="Runs a case; medians are shown.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line a case instead of a table.")] = False,
) -> None:
    """Prefill and decode through the engine against transformers' own generate, on the same model in the same run."""
    _show(
        _against_transformers(model_path, prompt_tokens, [int(n) for n in contexts.split(",")], runs), as_json, "transformers"
    )


def overhead(
    model_path: Annotated[str, typer.Option(help="Model to run.")] = "smollm2",
    prompt_tokens: Annotated[int, typer.Option(help="Prompt of each request; no two are alike.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Answer of each request.")] = 16,
    requests: Annotated[int, typer.Option(help="Requests a run, four at once.")] = 4,
    runs: Annotated[int, typer.Option(help="Runs a side; medians are shown.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line instead of a table.")] = False,
) -> None:
    """What the cache costs when nothing is ever reused, tier by tier, against --disable-radix-cache.

    A second engine without cache shows the noise.
    """
    from engine.model import load_model

    common = {"max_total_tokens": 2 * requests * (prompt_tokens + output_tokens), "max_running_requests": requests}
    serial = iter(range(10**9))

    def load(core: EngineCore) -> None:
        for _ in range(requests):
            ask(core, random_tokens(prompt_tokens, next(serial)), output_tokens)
        drain(core)

    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        disk = {"hicache_storage_backend": "lmdb", "hicache_storage_dir": folder, "hicache_storage_size": "4GB"}
        setups: dict[str, dict[str, object]] = {
            "off": {"disable_radix_cache": True},
            "off again": {"disable_radix_cache": True},  # what two engines without a difference differ by
            "device": {},
            "+host": {"enable_hierarchical_cache": True},
            "+disk": {"enable_hierarchical_cache": True, **disk},
        }
        model = load_model(model_path, "float32", "cpu")  # one for all: where weights lie alone makes some percent
        cores = {name: make_core(model_path, model, **common, **flags) for name, flags in setups.items()}
        for core in cores.values():
            load(core)
        seconds: dict[str, list[float]] = {name: [] for name in cores}
        for turn in range(runs):
            for name in islice(cycle(cores), turn % len(cores), turn % len(cores) + len(cores)):  # nobody always comes first
                seconds[name].append(_seconds(partial(load, cores[name])))
        _show(
            (_figure(f"no reuse, {name}", seconds[name], seconds["off"]) for name in cores if name != "off"),
            as_json,
            "cache off",
        )
        for core in cores.values():
            core.close(0.0)


def _against_transformers(model_path: str, prompt_tokens: int, contexts: list[int], runs: int) -> Iterator[Figure]:
    import torch
    from transformers import AutoModelForCausalLM

    from engine.gguf import as_folder
    from engine.tokenizer import resolve_model

    source = as_folder(resolve_model(model_path), torch.float32)
    assert source.gguf_file is None, "the model's folder in the cache could not be written"
    hf = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    hf.train(False)
    core = make_core(
        model_path, disable_radix_cache=True, max_total_tokens=max(8192, 2 * max(contexts)), chunked_prefill_size=8192
    )
    prompt = torch.tensor([random_tokens(prompt_tokens, 1)])

    @torch.inference_mode()
    def forward() -> None:
        hf(prompt, logits_to_keep=1)

    yield _turns(f"prefill {prompt_tokens}", lambda: answer(core, prompt[0].tolist(), 1), forward, runs)
    for context in contexts:
        yield _decode(core, hf, context, runs)
    yield _batch(core, 8, runs)
    core.close(0.0)


def _decode(core: EngineCore, hf: GenerationMixin, context: int, runs: int) -> Figure:
    """Seconds a token of an answer, from its first on, on both sides."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        """Notes when each token is there, and stops nothing."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    tokens = random_tokens(context, context)
    prompt = torch.tensor([tokens])

    @torch.inference_mode()
    def generate_s() -> float:
        clock = Clock()
        count = DECODED
        hf.generate(
            prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, stopping_criteria=StoppingCriteriaList([clock])
        )
        return (clock.times[-1] - clock.times[0]) / (count - 1)

    pairs = [(_decode_s(core, [tokens]), generate_s()) for _ in range(runs)]
    return _figure(f"decode at {context}", [pair[0] for pair in pairs], [pair[1] for pair in pairs])


def _batch(core: EngineCore, batch: int, runs: int) -> Figure:
    """Seconds in which `batch` requests decode a token each, together and one after the other, at 128 tokens of context."""
    prompts = [random_tokens(128, seed) for seed in range(batch)]
    pairs = [(_decode_s(core, prompts), batch * _decode_s(core, prompts[:1])) for _ in range(runs)]
    return _figure(f"decode of {batch} at once against one by one", [pair[0] for pair in pairs], [pair[1] for pair in pairs])


def _decode_s(core: EngineCore, prompts: list[list[int]]) -> float:
    """Seconds of a decode step of these requests, after one step that computes all prompts."""
    for prompt in prompts:
        ask(core, prompt, DECODED)
    core.step()
    return _seconds(partial(drain, core)) / (DECODED - 1)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _turns(case: str, ours: Callable[[], object], other: Callable[[], object], runs: int) -> Figure:
    """Time both sides in turns, each first every other time, after one run of each that does not count."""
    ours()
    other()
    pairs = []
    for turn in range(runs):
        if turn % 2:
            other_s = _seconds(other)
            pairs.append((_seconds(ours), other_s))
        else:
            pairs.append((_seconds(ours), _seconds(other)))
    return _figure(case, [pair[0] for pair in pairs], [pair[1] for pair in pairs])


def _figure(case: str, ours: list[float], other: list[float]) -> Figure:
    a, b = statistics.median(ours), statistics.median(other)
    return Figure(case, a, b, round(b / a, 4), round(min(other) / min(ours), 4))


def _show(figures: Iterator[Figure], as_json: bool, other: str) -> None:
    if not as_json:
        print(f"{'case':<38} {'hicache':>10} {other:>14} {'times quicker':>14} {'quickest runs':>14}")
    for figure in figures:
        if as_json:
            print(json.dumps(figure._asdict()), flush=True)
        else:
            case, ours_s, other_s, ratio, best_ratio = figure
            print(f"{case:<38} {ours_s:>9.4f}s {other_s:>13.4f}s {ratio:>14.4f} {best_ratio:>14.4f}", flush=True)
