"""`hicache serve`: its flags are the fields of ServeConfig."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer

from engine.config import GIB, ServeConfig, flag_of, load_config
from hicache.errors import ConfigError, ModelRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.server.service import Service

__all__ = ["run", "serve_command"]

COLUMN = 16
_CONFIG_HELP = "YAML file of flags, named as here; a flag on the command line overrides it."


def serve_command() -> Callable[..., None]:
    """Make the command: one option for each field of ServeConfig, with its help, unit and default."""

    def serve(**given: Any) -> None:
        file: Path | None = given.pop("config")
        raise typer.Exit(run({name: value for name, value in given.items() if value is not None}, file))

    annotations = {field.name: _option(field) for field in msgspec.structs.fields(ServeConfig)}
    annotations["config"] = Annotated[Path | None, typer.Option("--config", help=_CONFIG_HELP, metavar="FILE")]
    serve.__annotations__ = annotations
    serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    return serve


def run(given: dict[str, Any], file: Path | None) -> int:
    """Serve with these flags; returns the exit status: 2 for what was refused, 1 for an engine that died at start."""
    from engine.client import EngineDead, EngineRefused  # after --help, which needs none of it

    try:
        _serve(load_config(given, file))
    except (ConfigError, ModelRefused, EngineRefused) as error:
        return _fail(str(error), 2)
    except EngineDead as error:
        return _fail(str(error), 1)
    return 0


def _serve(config: ServeConfig) -> None:
    from engine.client import LOG_FORMAT
    from engine.server.run import serve

    logging.basicConfig(level=config.log_level.upper(), format=LOG_FORMAT)
    asyncio.run(serve(config, _run_engine, announce))


def _run_engine(config: ServeConfig, to_engine: str, to_server: str) -> None:
    """The engine's process; it alone imports the engine, which takes seconds."""
    from engine.loop import run_engine

    run_engine(config, to_engine, to_server)


def announce(service: Service, port: int) -> None:
    """Say what runs, with which configuration, and how to try it."""
    config = service.config
    url = f"http://{config.host}:{port}"
    lines = [f"hicache {version('hicache')} serves {config.name} on {url}"]
    lines += [line for key, value in service.client.info.items() for line in _described(key, value)]
    flags = " ".join(f"{flag_of(name)} {value}" for name, value in config.describe().items() if value not in ("None", ""))
    lines += _described("configuration", flags)
    if config.host not in ("127.0.0.1", "localhost", "::1") and config.api_key is None:
        lines += _described("warning", "open to the network without --api-key")
    print("\n".join([*lines, "Try it:", f"  {_curl(config, url)}"]), flush=True)


def _curl(config: ServeConfig, url: str) -> str:
    body = json.dumps({"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32})
    key = "" if config.api_key is None else ' -H "Authorization: Bearer $API_KEY"'
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


def _described(key: str, value: object) -> list[str]:
    """Lines of one fact; a fact that has parts is a line a part."""
    if isinstance(value, dict):
        return [line for name, part in value.items() for line in _described(f"{key} {name}", _facts(part))]
    return [f"  {key:<{COLUMN}} {value}"]


def _facts(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return ", ".join(_size(part) if name == "bytes" else f"{name} {part}" for name, part in value.items())


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"


def _fail(message: str, status: int) -> int:
    print(f"hicache: {' '.join(message.split())}", file=sys.stderr)
    return status


def _option(field: msgspec.structs.FieldInfo) -> Any:
    """The option of a field. Values stay text here; ServeConfig judges them, so that a file is judged alike."""
    kind, about = get_args(field.type)[0], next(extra for extra in field.type.__metadata__ if extra.description)
    flag = flag_of(field.name)
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=f"{about.description} Default: off.")]
    help_text = about.description + _default(field)
    return Annotated[str | None, typer.Option(flag, help=help_text, metavar=_metavar(kind))]


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required or field.default in (None, ""):
        return ""
    return f" Default: {field.default}."


def _metavar(kind: Any) -> str:
    """How a value looks: its choices, or the kind of value."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    text = str(kind)
    return "INT" if "int" in text else "NUMBER" if "float" in text else "TEXT"
