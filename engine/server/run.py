"""Run the server: start the engine, listen, say so, drain on a signal, stop the engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from typing import TYPE_CHECKING

import uvicorn

from engine.client import EngineClient
from engine.server.app import create_app
from engine.server.metrics import ServerMetrics
from engine.server.service import Service
from engine.tokenizer import load_tokenizer, resolve_model
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine.client import Target
    from engine.config import ServeConfig
    from engine.tokenizer import Tokenizer

__all__ = ["HttpServer", "listen_socket", "serve"]

LAST_WORDS_S = 2.0
"""How long answers that were cut off may take to reach their clients."""


async def serve(config: ServeConfig, target: Target, announce: Callable[[Service, int], None]) -> None:
    """Serve until SIGTERM or SIGINT. A second signal cuts the drain short.

    announce: called with the service and the port once connections are accepted.
    Raises ConfigError, ModelRefused, EngineRefused or EngineDead if the server can't start.
    """
    path = resolve_model(config.model_path)
    with listen_socket(config.host, config.port) as listening, _signals() as stop:
        client = EngineClient(config, target)
        try:
            loading = asyncio.create_task(_load(client, path.resolve()))
            if (tokenizer := await _unless_stopped(loading, stop)) is None:
                return
            service = Service(config, client, tokenizer, ServerMetrics())
            await _listen(service, listening, stop, announce)
        finally:
            await client.shutdown(0.0)


def listen_socket(host: str, port: int) -> socket.socket:
    """Bind the address before anything slow is loaded. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}") from None
    return bound


async def _load(client: EngineClient, path: Path) -> Tokenizer:
    """Start the engine and load the tokenizer side by side."""
    tokenizer = asyncio.create_task(asyncio.to_thread(load_tokenizer, path))
    engine = asyncio.create_task(client.start())
    try:
        await asyncio.gather(tokenizer, engine)
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
    return tokenizer.result()


async def _unless_stopped(loading: asyncio.Task[Tokenizer], stop: asyncio.Event) -> Tokenizer | None:
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return loading.result() if loading.done() else None
    finally:
        stopped.cancel()
        loading.cancel()
        await asyncio.gather(loading, stopped, return_exceptions=True)


async def _listen(
    service: Service, listening: socket.socket, stop: asyncio.Event, announce: Callable[[Service, int], None]
) -> None:
    """Accept connections until `stop`, then let those that are open finish for the drain time, and abort the rest."""
    drain_s = service.config.drain_timeout
    settings = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=math.ceil(drain_s + LAST_WORDS_S),
    )
    port: int = listening.getsockname()[1]
    server = HttpServer(settings, lambda: announce(service, port))
    serving = asyncio.create_task(server.serve([listening]))
    await _first_of(serving, stop, None)
    stop.clear()
    server.should_exit = True
    await _first_of(serving, stop, drain_s)
    service.client.abort_all()
    await serving


async def _first_of(task: asyncio.Task[None], stop: asyncio.Event, timeout_s: float | None) -> None:
    """Wait for the task, the event or the time, whichever comes first."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()


class HttpServer(uvicorn.Server):
    """uvicorn with the signals left to us, and a word when it listens."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
