"""`hicache bench schedule`: schedule policies on the real scheduler and cache, with modelled time; no model is loaded."""

from __future__ import annotations

import json
import time
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from engine.schedule_policy import SchedulePolicyName
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from engine.schedule.compare import Row
    from engine.schedule.queue_cost import QueueCost
    from engine.schedule.step_overhead import Part

__all__ = ["schedule"]

POLICIES = ("fcfs", "lpm", "cache-aware", "dfs-weight")
LOAD = 0.9


def _print_rows(rows: Iterator[Row], as_json: bool) -> None:
    if not as_json:
        print(f"{'workload':<40} {'policy':<12} {'TTFT':>8} {'p99':>8} {'alone':>8} {'p99':>8} {'reused':>7}")
    for row in rows:
        if as_json:
            print(json.dumps(row._asdict()), flush=True)
        else:
            figures = "".join(f" {figure:>8.3f}" for figure in row[2:6])
            print(f"{row.workload:<40} {row.policy:<12}{figures} {row.reused:>7.1%}", flush=True)


def _print_costs(costs: Iterable[QueueCost], as_json: bool) -> None:
    if not as_json:
        print(f"{'policy':<12} {'waiting':>8} {'median us':>10} {'p99 us':>10} {'worst us':>10}   a step's scheduling")
    for cost in costs:
        if as_json:
            print(json.dumps(cost._asdict()), flush=True)
        else:
            print(f"{cost.policy:<12} {cost.waiting:>8} {cost.median_us:>10.0f} {cost.p99_us:>10.0f} {cost.worst_us:>10.0f}")


def _print_overhead(parts: Iterable[Part], as_json: bool) -> None:
    if not as_json:
        print(f"{'part of a decode step of 8 sequences':<44} {'median us':>10} {'p99 us':>10}")
    for part in parts:
        if as_json:
            print(json.dumps(part._asdict()), flush=True)
        else:
            print(f"{part.name:<44} {part.median_us:>10.0f} {part.p99_us:>10.0f}")


def schedule(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line a figure instead of a table.")] = False,
    trace: Annotated[
        list[Path] | None, typer.Option("--trace", help="Replay slices of this block-hash trace; may be given again.")
    ] = None,
    load: Annotated[float, typer.Option("--load", help="Work a second in a trace, if nothing were computed twice.")] = LOAD,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Workloads drawn for each figure.")] = 5,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="Only this policy; may be given again.")] = None,
    waiting: Annotated[
        int, typer.Option("--waiting", min=0, help="Instead, measure what a step's scheduling costs with so many waiting.")
    ] = 0,
    overhead: Annotated[
        bool, typer.Option("--overhead", help="Instead, measure a decode step of 8 sequences apart from the model.")
    ] = False,
) -> None:
    """Compare schedule policies: time to first token and reuse, by workload. Time is modelled, scheduler and cache are real."""
    policies = tuple(policy or (get_args(SchedulePolicyName) if waiting else POLICIES))
    for name in policies:
        if name not in get_args(SchedulePolicyName):
            raise typer.BadParameter(f"{name} is none of {', '.join(get_args(SchedulePolicyName))}", param_hint="--policy")
    from engine.schedule import compare, queue_cost, step_overhead  # after --help, which needs none of it

    started = time.perf_counter()
    try:
        if overhead:
            _print_overhead(step_overhead.measure(), as_json)
        elif waiting:
            _print_costs((queue_cost.measure(name, waiting) for name in policies), as_json)
        elif trace:
            for path in trace:
                _print_rows(compare.traced(path, load, policies, seeds), as_json)
        else:
            _print_rows(compare.made_up(policies, seeds), as_json)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if not as_json:
        print(f"took {time.perf_counter() - started:.0f} s")
