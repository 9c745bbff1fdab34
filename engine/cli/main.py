"""The `hicache` command. Heavy imports wait until a command runs, so that --help is quick."""

from __future__ import annotations

import typer

from engine.cli.serve import serve_command

__all__ = ["app"]

app = typer.Typer(
    help="A hierarchical GPU/CPU/disk KV cache with a serving engine on top.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: tables cut the names of flags
)
app.command("serve", help="Serve a model over HTTP, with the cache on.")(serve_command())


@app.callback()
def _main() -> None:
    """Keep `serve` a sub-command while it is the only one."""
