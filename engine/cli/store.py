"""`hicache store stat|check|scrub|clear|compact PATH`: look after a store folder, beside a running server or without one."""

from __future__ import annotations

import datetime
import json
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tqdm import tqdm

from storage import maintenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from storage.base import NamespaceStats, StoreStats
    from storage.verify import VerifyReport

__all__ = ["app"]

app = typer.Typer(help="Look after a store folder.", no_args_is_help=True, rich_markup_mode=None)

Folder = Annotated[Path, typer.Argument(metavar="PATH", help="The store's folder (--hicache-storage-dir).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_AGE_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN = 20
PROGRESS_AFTER_S = 0.2
"""What is done by then, or can't begin, shows no progress bar."""


@app.command()
def stat(path: Folder, as_json: AsJson = False) -> None:
    """Show what is in a store, by namespace: pages, tokens, bytes, ages."""
    stats = maintenance.stat(path)
    if as_json:
        typer.echo(json.dumps(_stats_fields(stats)))
        return
    share = stats.bytes / stats.capacity_bytes
    typer.echo(f"{stats.pages} pages, {_size(stats.bytes)} of {_size(stats.capacity_bytes)} on disk ({share:.0%})")
    for space in stats.namespaces:
        typer.echo(_describe(space))


@app.command()
def check(path: Folder, as_json: AsJson = False) -> None:
    """Check structure, accounting and every payload. Exit status 1 if anything is damaged."""
    with _progress("check", shown=not as_json) as progress:
        report = maintenance.check(path, progress)
    typer.echo(json.dumps(_report_fields(report)) if as_json else _describe_report(report))
    raise typer.Exit(0 if report.sound else 1)


@app.command()
def scrub(path: Folder, as_json: AsJson = False) -> None:
    """Repair what check finds: delete bad pages, build a damaged index anew from the records."""
    with _progress("scrub", shown=not as_json) as progress:
        report = maintenance.scrub(path, progress)
    if as_json:
        fields = _report_fields(report.found) | {"deleted": report.deleted, "rebuilt": report.rebuilt}
        typer.echo(json.dumps(fields))
        return
    typer.echo(_describe_report(report.found))
    typer.echo(f"deleted {report.deleted} pages; the index was {'built anew' if report.rebuilt else 'kept'}")


@app.command()
def clear(
    path: Folder,
    namespace: Annotated[str, typer.Option(help="Only this namespace: its digest in hex, or the beginning of it.")] = "",
    older_than: Annotated[str, typer.Option(help="Only pages not used for this long, such as 90s, 30m, 12h or 7d.")] = "",
    as_json: AsJson = False,
) -> None:
    """Delete pages: all, one namespace's, or those not used for some time."""
    if namespace and older_than:
        raise typer.BadParameter("give --namespace or --older-than, not both")
    digest = _find_namespace(maintenance.stat(path), namespace) if namespace else None
    cleared = maintenance.clear(path, digest, _seconds(older_than) if older_than else None)
    typer.echo(json.dumps({"cleared_pages": cleared}) if as_json else f"deleted {cleared} pages")


@app.command()
def compact(path: Folder, as_json: AsJson = False) -> None:
    """Give free blocks back to the file system."""
    report = maintenance.compact(path)
    saved = f"{_size(report.bytes_before)} on disk before, {_size(report.bytes_after)} after"
    typer.echo(json.dumps(report._asdict()) if as_json else saved)


# helpers


@contextmanager
def _progress(name: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    with tqdm(desc=name, unit="page", disable=not shown, delay=PROGRESS_AFTER_S) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def _find_namespace(stats: StoreStats, beginning: str) -> bytes:
    digests = [space.info.digest for space in stats.namespaces if space.info.digest.hex().startswith(beginning.lower())]
    if len(digests) != 1:
        raise typer.BadParameter(f"{len(digests)} namespaces begin with {beginning}")
    return digests[0]


def _seconds(age: str) -> float:
    match = _AGE.fullmatch(age)
    if match is None:
        raise typer.BadParameter(f"{age} is not an age such as 90s, 30m, 12h or 7d")
    return float(match[1]) * _AGE_SECONDS[match[2]]


def _size(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size = round(size / 1024)
    return f"{size / 1024:.1f} GiB"


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ") if seconds else "never"


def _describe(space: NamespaceStats) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in space.info.labels.items())
    tenant = f" tenant {space.info.tenant}" if space.info.tenant else ""
    held = f"{space.pages} pages, {space.tokens} tokens, {_size(space.bytes)}"
    used = f"used {_time(space.oldest_use_s)} to {_time(space.newest_use_s)}"
    return f"{space.info.digest.hex()}{tenant}: {held}; {used}; {labels}"


def _describe_report(report: VerifyReport) -> str:
    lines = [f"{report.pages} pages, {_size(report.bytes)} of payload checked"]
    lines += [f"index: {line}" for line in report.contradictions[:_SHOWN]]
    lines += [f"page {page.key.hex()}: {page.reason}" for page in report.bad[:_SHOWN]]
    lines += [f"... {len(report.bad) - _SHOWN} more bad pages"] if len(report.bad) > _SHOWN else []
    lines.append("sound" if report.sound else f"damaged: {len(report.bad)} pages, {len(report.contradictions)} contradictions")
    return "\n".join(lines)


def _report_fields(report: VerifyReport) -> dict[str, object]:
    return {
        "sound": report.sound,
        "pages": report.pages,
        "bytes": report.bytes,
        "contradictions": list(report.contradictions),
        "bad": [{"key": page.key.hex(), "reason": page.reason} for page in report.bad],
    }


def _stats_fields(stats: StoreStats) -> dict[str, object]:
    spaces = [
        space._asdict()
        | {"info": {"digest": space.info.digest.hex(), "tenant": space.info.tenant, "labels": dict(space.info.labels)}}
        for space in stats.namespaces
    ]
    return {"pages": stats.pages, "bytes": stats.bytes, "capacity_bytes": stats.capacity_bytes, "namespaces": spaces}
