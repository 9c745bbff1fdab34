"""`hicache bench copy`: pages between device and host, neighbours and scattered, beside one plain copy of the same bytes."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, NamedTuple, cast, get_args

import typer
from tqdm import tqdm

from hicache.errors import ConfigError
from hicache.transfer.io_backend import IoBackendName

__all__ = ["PAGE_KIB", "Figure", "copy"]

PAGE_KIB = (64, 256, 1024, 2048, 8192)


class Figure(NamedTuple):
    """Throughput of one kind of copy, and of the limit, measured in turns; medians. share: of the two, run by run."""

    page_kib: int
    op: str
    pattern: str
    gib_s: float
    limit_gib_s: float
    share: float


def copy(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    io_backend: Annotated[str, typer.Option(help="auto, direct or kernel; as --hicache-io-backend.")] = "auto",
    moved_mib: Annotated[int, typer.Option(min=1, help="MiB a copy; the pools hold six times as much, each.")] = 128,
    runs: Annotated[int, typer.Option(min=1, help="Runs; medians are shown.")] = 9,
    plot: Annotated[Path | None, typer.Option(help="Draw throughput over page size into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a figure, and nothing else.")] = False,
) -> None:
    """Copies of pages between device and host memory, beside one plain copy of the same bytes."""
    if device not in ("auto", "cpu", "cuda") or io_backend not in get_args(IoBackendName):
        raise typer.BadParameter(f"device is auto, cpu or cuda; io-backend is {', '.join(get_args(IoBackendName))}")
    import torch

    from engine.cli.copy_speed import CASES, measure

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    figures = []
    try:
        measured = measure(device, cast("IoBackendName", io_backend), moved_mib, runs)
        total = len(PAGE_KIB) * len(CASES)
        for figure in tqdm(measured, total=total, unit="figure", disable=as_json or None, file=sys.stderr):
            figures.append(figure)
            if as_json:
                typer.echo(json.dumps({"device": device, **figure._asdict()}))
    except ConfigError as error:
        typer.echo(f"hicache bench copy: {error}", err=True)
        raise typer.Exit(2) from None
    if not as_json:
        _print_table(figures, _limit_name(device))
    if plot is not None:
        _draw(figures, _limit_name(device), plot)


def _limit_name(device: str) -> str:
    return "memcpy" if device == "cpu" else "one copy"


def _print_table(figures: list[Figure], limit: str) -> None:
    typer.echo(f"{'page':>9}  {'copy':<10} {'slots':<10} {'GiB/s':>6} {limit:>9} {'share':>6}")
    for page_kib, op, pattern, gib_s, limit_gib_s, share in figures:
        typer.echo(f"{page_kib:>5} KiB  {op:<10} {pattern:<10} {gib_s:>6.2f} {limit_gib_s:>9.2f} {share:>6.1%}")


def _draw(figures: list[Figure], limit: str, path: Path) -> None:
    """Throughput over page size, a line a kind of copy, and the limit of each direction dashed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn, axes = plt.subplots(figsize=(8, 5))
    lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for figure in figures:
        lines[f"{figure.op}, {figure.pattern}", "-"].append((figure.page_kib, figure.gib_s))
        if figure.pattern == "coalesced":
            lines[f"{figure.op}, {limit}", "--"].append((figure.page_kib, figure.limit_gib_s))
    for (name, style), points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=name)
    axes.set(xlabel="page, KiB", ylabel="GiB/s", xscale="log", ylim=(0, None))
    axes.set_xticks(PAGE_KIB, [f"{size:,}" for size in PAGE_KIB])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    drawn.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(drawn)
