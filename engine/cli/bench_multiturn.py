"""`hicache bench multiturn`: conversations that grow, against a running server or against four of its own, side by side."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import httpx
import typer
from tqdm import tqdm

from engine.cli.load import Load, run_in_turns, run_load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.cli.load import Turn

__all__ = ["Result", "multiturn"]

START_S, STOP_S = 300.0, 60.0


class Setup(NamedTuple):
    """One way of running the same load: a name, and flags beside the common ones."""

    name: str
    flags: tuple[str, ...]


class Result(NamedTuple):
    """What one setup made of the load."""

    name: str
    turns: list[Turn]
    seconds: float

    def later(self) -> list[Turn]:
        """Turns with a history."""
        return [turn for turn in self.turns if turn.round > 0]

    def row(self) -> dict[str, Any]:
        """Figures of the later rounds (TTFT, hits) and of the whole run (throughput)."""
        later = self.later()
        ttft = sorted(turn.ttft_s for turn in later)
        prompt = sum(turn.prompt_tokens for turn in later)
        return {
            "setup": self.name,
            "requests": len(self.turns),
            "ttft_first_round_p50_s": round(statistics.median(t.ttft_s for t in self.turns if t.round == 0), 4),
            "ttft_p50_s": round(statistics.median(ttft), 4),
            "ttft_p90_s": round(ttft[int(0.9 * (len(ttft) - 1))], 4),
            "ttft_p99_s": round(ttft[int(0.99 * (len(ttft) - 1))], 4),
            "latency_p50_s": round(statistics.median(turn.latency_s for turn in later), 4),
            "tokens_per_s": round(sum(t.prompt_tokens + t.output_tokens for t in self.turns) / self.seconds, 1),
            "later_rounds_tokens_per_s": round(self._later_rate(), 1),
            "hit_share": round(sum(sum(turn.cached) for turn in later) / prompt, 4),
            "hit_share_by_tier": {
                tier: round(sum(turn.cached[i] for turn in later) / prompt, 4)
                for i, tier in enumerate(("device", "host", "disk"))
            },
        }

    def _later_rate(self) -> float:
        """Tokens a second of the turns with a history, by the time that was spent in them."""
        later = self.later()
        return sum(t.prompt_tokens + t.output_tokens for t in later) / max(1e-9, sum(t.latency_s for t in later))

    def by_round(self) -> list[dict[str, Any]]:
        """Median TTFT and cached share, by round."""
        out = []
        for number in sorted({turn.round for turn in self.turns}):
            turns = [turn for turn in self.turns if turn.round == number]
            out.append(
                {
                    "round": number,
                    "ttft_p50_s": round(statistics.median(turn.ttft_s for turn in turns), 4),
                    "hit_share": round(sum(sum(t.cached) for t in turns) / sum(t.prompt_tokens for t in turns), 4),
                }
            )
        return out


def multiturn(
    url: Annotated[str | None, typer.Option(help="Server to load; without it, servers are started for --compare.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run cache off, device only, +host, +disk one after the other.")
    ] = False,
    only: Annotated[str, typer.Option(help="Of --compare's setups these, by name, separated by commas; else all.")] = "",
    in_turns: Annotated[
        bool, typer.Option("--in-turns", help="Keep all of --compare's servers up; each round runs on one after the other.")
    ] = False,
    model_path: Annotated[str, typer.Option(help="Model of the servers that --compare starts.")] = "smollm2",
    clients: Annotated[int, typer.Option(help="Conversations.")] = 8,
    rounds: Annotated[int, typer.Option(help="Requests a conversation.")] = 4,
    first_tokens: Annotated[int, typer.Option(help="Prompt tokens of the first request.")] = 1024,
    request_tokens: Annotated[int, typer.Option(help="Tokens that each later request adds.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    parallel: Annotated[int, typer.Option(help="Requests in flight at most.")] = 4,
    rate: Annotated[float, typer.Option(help="Arrivals a second (Poisson); 0: as fast as --parallel allows.")] = 0.0,
    barrier: Annotated[bool, typer.Option(help="Start a round only when the last one is over.")] = True,
    ready_queue: Annotated[str, typer.Option(help="Which ready conversation goes next: fifo or random.")] = "fifo",
    pool_share: Annotated[float, typer.Option(help="Device pool of --compare's servers as a share of the working set.")] = 0.25,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write TTFT by round as a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line a setup instead of a table.")] = False,
) -> None:
    """Multi-turn chat: time to first token, latency, throughput and hits by tier, by round."""
    if (url is None) != compare:
        raise typer.BadParameter("give either --url or --compare")
    queue: Literal["fifo", "random"] = "random" if ready_queue == "random" else "fifo"
    load = Load(clients, rounds, first_tokens, request_tokens, output_tokens, parallel, rate, barrier, queue, seed)
    results = []
    if url is not None:
        results.append(_measure(Setup("server", ()), url, load))
    elif in_turns:
        results += _measure_in_turns(model_path, _chosen(setups(load, pool_share), only), load)
    else:
        for setup in _chosen(setups(load, pool_share), only):
            with _server(model_path, setup) as address:
                results.append(_measure(setup, address, load))
    _report(results, as_json)
    if plot is not None:
        _plot(results, plot)


def setups(load: Load, pool_share: float) -> list[Setup]:
    """The four setups, sized by the load: each adds a tier, and the last one it has holds everything."""
    history = load.first_tokens + (load.rounds - 1) * load.request_tokens + load.rounds * load.output_tokens
    working_set = load.clients * history
    small = max(int(pool_share * working_set), history + 64)
    large = int(1.2 * working_set)
    tiers = ("--enable-hierarchical-cache", "--hicache-ratio", f"{large / small:.2f}")
    modest = ("--enable-hierarchical-cache", "--hicache-ratio", "2.0", "--hicache-storage-backend", "lmdb")
    return [
        Setup("cache off", ("--disable-radix-cache", "--max-total-tokens", str(large))),
        Setup("device", ("--max-total-tokens", str(large))),
        Setup("device small", ("--max-total-tokens", str(small))),
        Setup("+host", ("--max-total-tokens", str(small), *tiers)),
        Setup("+disk", ("--max-total-tokens", str(small), *modest, "--hicache-storage-prefetch-policy", "wait_complete")),
    ]


def _chosen(all_setups: list[Setup], only: str) -> list[Setup]:
    names = {name.strip() for name in only.split(",") if name.strip()}
    if unknown := names - {setup.name for setup in all_setups}:
        raise typer.BadParameter(
            f"no setup is named {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in all_setups)}"
        )
    return [setup for setup in all_setups if not names or setup.name in names]


@contextmanager
def _server(model_path: str, setup: Setup) -> Iterator[str]:
    """Run `hicache serve` with a store of its own, and yield its address."""
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        store = ("--hicache-storage-dir", folder) if "--hicache-storage-backend" in setup.flags else ()
        command = [
            str(Path(sys.executable).with_name("hicache")), "serve", "--model-path", model_path, "--port", str(port),
            "--log-level", "warning", *setup.flags, *store,
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ})
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise typer.Exit(1)
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise typer.Exit(1)


def _measure_in_turns(model_path: str, chosen: list[Setup], load: Load) -> list[Result]:
    if not load.barrier:
        raise typer.BadParameter("--in-turns goes by rounds; it needs --barrier")
    turns: list[list[Turn]] = [[] for _ in chosen]
    with ExitStack() as stack:
        urls = [stack.enter_context(_server(model_path, setup)) for setup in chosen]
        bar = stack.enter_context(tqdm(total=len(chosen) * load.clients * load.rounds, unit="turn", file=sys.stderr))

        def done(server: int, turn: Turn) -> None:
            turns[server].append(turn)
            bar.update()

        seconds = asyncio.run(run_in_turns(urls, load, _vocab_size(urls[0]), done))
    return [Result(setup.name, mine, spent) for setup, mine, spent in zip(chosen, turns, seconds, strict=True)]


def _vocab_size(url: str) -> int:
    return int(httpx.get(f"{url}/get_server_info").json()["engine"]["vocab_size"])


def _measure(setup: Setup, url: str, load: Load) -> Result:
    turns: list[Turn] = []
    with tqdm(total=load.clients * load.rounds, desc=setup.name, unit="turn", file=sys.stderr) as bar:

        def done(turn: Turn) -> None:
            turns.append(turn)
            bar.update()

        seconds = asyncio.run(run_load(url, load, _vocab_size(url), done))
    return Result(setup.name, turns, seconds)


def _report(results: list[Result], as_json: bool) -> None:
    rows = [{**result.row(), "rounds": result.by_round()} for result in results]
    if as_json:
        for row in rows:
            print(json.dumps(row), flush=True)
        return
    print(f"{'setup':<14} {'TTFT p50':>9} {'p90':>8} {'p99':>8} {'e2e p50':>8} {'tokens/s':>9}   hits: device   host   disk")
    for row in rows:
        hits = row["hit_share_by_tier"]
        print(
            f"{row['setup']:<14} {row['ttft_p50_s']:>8.3f}s {row['ttft_p90_s']:>7.3f}s {row['ttft_p99_s']:>7.3f}s "
            f"{row['latency_p50_s']:>7.3f}s {row['tokens_per_s']:>9.1f}   "
            f"{hits['device']:>12.1%} {hits['host']:>6.1%} {hits['disk']:>6.1%}"
        )
    print("TTFT, e2e and hits are of the rounds after the first; tokens/s counts prompt and answer tokens of the whole run.")


def _plot(results: list[Result], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5))
    for result in results:
        rounds = result.by_round()
        axis.plot([row["round"] for row in rounds], [row["ttft_p50_s"] for row in rounds], marker="o", label=result.name)
    axis.set_xlabel("round")
    axis.set_ylabel("median time to first token, s")
    axis.set_yscale("log")
    axis.set_xticks(sorted({turn.round for result in results for turn in result.turns}))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
