"""The `hicache` command. What a command needs is imported when it runs, so that --help is quick."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from engine.cli import (
    bench_copy,
    bench_engine,
    bench_multiturn,
    bench_overlap,
    bench_schedule,
    bench_store,
    bench_tree,
    simulate,
    store,
)
from engine.cli.serve import serve_command
from hicache.errors import HiCacheError
from storage.errors import StoreError

__all__ = ["app"]


class _Commands(TyperGroup):
    """All commands: what can't work is said in one line, with exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except (HiCacheError, StoreError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="A hierarchical GPU/CPU/disk KV cache with a serving engine on top.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: tables cut the names of flags
)
bench = typer.Typer(help="Measure parts of the cache on this machine.", no_args_is_help=True, rich_markup_mode=None)

app.command("serve", help="Serve a model over HTTP, with the cache on.")(serve_command())
app.add_typer(store.app, name="store")
app.add_typer(bench, name="bench")
app.command("simulate")(simulate.simulate)
bench.command("copy")(bench_copy.copy)
bench.command("tree")(bench_tree.tree)
bench.command("engine")(bench_engine.engine)
bench.command("overhead")(bench_engine.overhead)
bench.command("store")(bench_store.store)
bench.command("multiturn")(bench_multiturn.multiturn)
bench.command("overlap")(bench_overlap.overlap)
bench.command("schedule")(bench_schedule.schedule)
