"""`hicache simulate`: what tiers of which size, and which eviction policy, would make of a trace."""

from __future__ import annotations

import itertools
import json
import os
import statistics
from pathlib import Path  # noqa: TC003  typer reads the annotations
from typing import TYPE_CHECKING, Annotated, NamedTuple, get_args

import typer
from tqdm import tqdm

from hicache.belady import belady_hits
from hicache.config import EvictionPolicy, StorageAdmission, WritePolicy
from hicache.errors import ConfigError
from hicache.metrics import TIERS
from hicache.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.simulate import Outcome, Sizes
    from hicache.traces import Trace

__all__ = ["Rates", "Row", "rows", "simulate"]

MOST_BLOCKS = 2**31 - 1
"""Blocks of a tier, at most."""


class Rates(NamedTuple):
    """What a request's time to first token follows from: bytes and tokens a second, and bytes a token."""

    block_tokens: int
    prefill: float
    token_bytes: float
    host: float
    disk: float

    def ttft_s(self, trace: Trace, outcome: Outcome) -> list[float]:
        """Seconds of each request, without queueing: blocks come from disk to host to device, then the rest is computed."""
        block_bytes = self.block_tokens * self.token_bytes
        out = []
        for request, hits in zip(trace.requests, outcome.hits, strict=True):
            loaded = hits.disk * block_bytes / self.disk + (hits.host + hits.disk) * block_bytes / self.host
            computed = max(1, request.input_tokens - hits.total * self.block_tokens)
            out.append(loaded + computed / self.prefill)
        return out


class Row(NamedTuple):
    """One configuration and what came of it. belady: the optimum's share of hits, with all tiers as one."""

    sizes: Sizes
    eviction: EvictionPolicy
    outcome: Outcome
    belady: float
    ttft_s: list[float]

    def fields(self) -> dict[str, object]:
        """The row as JSON has it."""
        blocks = self.outcome.blocks
        return {
            "device_blocks": self.sizes.device,
            "host_blocks": self.sizes.host,
            "disk_blocks": self.sizes.disk,
            "eviction": self.eviction,
            "requests": len(self.outcome.hits),
            "blocks": blocks,
            "hit_share": self.outcome.hit_share,
            "hit_share_by_tier": dict(zip(TIERS, (hits / blocks for hits in self.outcome.by_tier), strict=True)),
            "belady_hit_share": self.belady,
            "disk_written_blocks": self.outcome.disk_written,
            "ttft_p50_s": statistics.median(self.ttft_s),
            "ttft_mean_s": statistics.fmean(self.ttft_s),
            "blocks_per_s": blocks / self.outcome.seconds,
            "us_per_request": 1e6 * self.outcome.seconds / len(self.outcome.hits),
        }


def rows(
    trace: Trace, grid: list[tuple[Sizes, EvictionPolicy]], write_policy: WritePolicy, admission: StorageAdmission, rates: Rates
) -> Iterator[Row]:
    """Replay every configuration; yields rows as they come."""
    from hicache.simulate import replay

    optimum: dict[tuple[int, int], float] = {}
    for sizes, eviction in grid:
        bound = (sum(sizes), sizes.device)
        if bound not in optimum:
            optimum[bound] = belady_hits(trace, *bound) / trace.blocks
        outcome = replay(trace, sizes, eviction, write_policy, storage_admission=admission)
        yield Row(sizes, eviction, outcome, optimum[bound], rates.ttft_s(trace, outcome))


def simulate(
    trace: Annotated[Path, typer.Option(help="Trace: a line of JSON a request (timestamp, input_length, hash_ids).")],
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens a block of the trace.")] = 512,
    device_blocks: Annotated[str, typer.Option(help="Sizes of the device tier in blocks, by commas.")] = "1000,10000",
    host_blocks: Annotated[str, typer.Option(help="Sizes of the host tier in blocks, by commas; 0: none.")] = "0",
    disk_blocks: Annotated[str, typer.Option(help="Sizes of the disk tier in blocks, by commas; 0: none.")] = "0",
    eviction: Annotated[
        str, typer.Option(help=f"Eviction policies, by commas: {', '.join(get_args(EvictionPolicy))}.")
    ] = "lru",
    write_policy: Annotated[WritePolicy, typer.Option(help="When blocks are copied to the tier below.")] = "write_through",
    storage_admission: Annotated[StorageAdmission, typer.Option(help="Which blocks go to disk.")] = "all",
    requests: Annotated[int | None, typer.Option(min=1, help="Replay only the first so many requests.")] = None,
    prefill_tokens_per_s: Annotated[
        float, typer.Option(min=1e-9, help="For the TTFT estimate: tokens computed a second.")
    ] = 5000,
    token_bytes: Annotated[float, typer.Option(min=1, help="KV bytes a token.")] = 131072,
    host_gb_per_s: Annotated[float, typer.Option(min=1e-9, help="Host to device, GB a second.")] = 20,
    disk_gb_per_s: Annotated[float, typer.Option(min=1e-9, help="Disk to host, GB a second.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Draw hit share over size into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line a configuration, and nothing else.")] = False,
) -> None:
    """Replay a trace through tree, page table and policies, without bytes: hits by tier for a grid of sizes and policies."""
    rates = Rates(block_tokens, prefill_tokens_per_s, token_bytes, host_gb_per_s * 1e9, disk_gb_per_s * 1e9)
    try:
        if plot is not None:
            _check_plot(plot)
        grid = _grid(device_blocks, host_blocks, disk_blocks, eviction)
        loaded = read_trace(trace, requests)
        done = []
        for row in tqdm(rows(loaded, grid, write_policy, storage_admission, rates), total=len(grid), disable=as_json or None):
            done.append(row)
            if as_json:
                typer.echo(json.dumps(row.fields()))
    except ConfigError as error:
        typer.echo(f"hicache simulate: {error}", err=True)
        raise typer.Exit(2) from None
    if not as_json:
        _print_table(done)
        _print_advice(loaded, done, rates)
    if plot is not None:
        _draw(done, plot)


def _grid(device: str, host: str, disk: str, eviction: str) -> list[tuple[Sizes, EvictionPolicy]]:
    """Every combination. Raises ConfigError."""
    from hicache.simulate import Sizes

    sizes = [_numbers(device, "--device-blocks", 1), _numbers(host, "--host-blocks", 0), _numbers(disk, "--disk-blocks", 0)]
    policies = []
    for name in eviction.split(","):
        if name.strip() not in get_args(EvictionPolicy):
            raise ConfigError(f"--eviction must be of {', '.join(get_args(EvictionPolicy))}, not {name.strip()}")
        policies.append(name.strip())
    return [(Sizes(*each), policy) for each in itertools.product(*sizes) for policy in policies]  # type: ignore[misc]


def _numbers(text: str, flag: str, least: int) -> list[int]:
    try:
        out = [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text}: expected whole numbers with commas between") from None
    if min(out) < least:
        raise ConfigError(f"{flag} {text}: at least {least} is needed")
    if max(out) > MOST_BLOCKS:
        raise ConfigError(f"{flag} {text}: at most {MOST_BLOCKS} are simulated")
    return out


def _print_table(done: list[Row]) -> None:
    heads = (
        "device",
        "host",
        "disk",
        "eviction",
        "hits %",
        "Belady",
        "device",
        "host",
        "disk",
        "TTFT p50",
        "mean s",
        "written",
    )
    typer.echo("".join(f"{head:>10}" for head in (*heads, "refs/s")))
    for row in done:
        blocks = row.outcome.blocks
        shares = (row.outcome.hit_share, row.belady, *(hits / blocks for hits in row.outcome.by_tier))
        cells = [str(each) for each in (*row.sizes, row.eviction)]
        cells += [f"{100 * share:.2f}" for share in shares]
        cells += [f"{statistics.median(row.ttft_s):.3f}", f"{statistics.fmean(row.ttft_s):.3f}"]
        cells += [str(row.outcome.disk_written), f"{blocks / row.outcome.seconds:.0f}"]
        typer.echo("".join(f"{cell:>10}" for cell in cells))


def _print_advice(trace: Trace, done: list[Row], rates: Rates) -> None:
    from hicache.advice import NEAR, advise

    with tqdm(desc="advice", disable=None) as progress:
        advice = advise(trace, min(row.sizes.device for row in done), done[0].eviction, progress.update)
    device, host, disk = (
        f"{blocks} blocks ({blocks * rates.block_tokens * rates.token_bytes / 2**30:.1f} GiB)" for blocks in advice.sizes
    )
    typer.echo(
        f"An infinite cache would hit {100 * advice.infinite:.2f} % of the blocks; {100 * NEAR:.0f} % of that needs about"
    )
    typer.echo(f"  device {device}, RAM {host}, disk {disk}: {100 * advice.hit_share:.2f} % with {done[0].eviction}.")


def _check_plot(path: Path) -> None:
    """Raise ConfigError, before hours of replay, for a file that can't be drawn into."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: the name of a PNG file ends in .png")
    if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"--plot {path}: can't be written")


def _draw(done: list[Row], path: Path) -> None:
    """Hit share over the size of all tiers together, a line a policy, and the optimum."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in done:
        lines.setdefault(row.eviction, []).append((sum(row.sizes), 100 * row.outcome.hit_share))
        lines.setdefault("Belady", []).append((sum(row.sizes), 100 * row.belady))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(set(points)), strict=True), marker="o", linestyle="--" if name == "Belady" else "-", label=name)
    axes.set(xlabel="blocks, all tiers", ylabel="share of blocks hit, %", xscale="log")
    sizes = sorted({sum(row.sizes) for row in done})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
