"""The HTTP side on a real socket, in a thread, before a scripted engine in a real process."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx

from engine.client import EngineClient
from engine.server.app import create_app
from engine.server.metrics import ServerMetrics
from engine.server.run import HttpServer, listen_socket
from engine.server.service import Service
from tests.scripted_engine import run_scripted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.config import ServeConfig
    from engine.tokenizer import Tokenizer

__all__ = ["http_server"]


@contextmanager
def http_server(config: ServeConfig, tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    """Serve in a thread; yields a client of it."""
    import uvicorn

    listening = listen_socket("127.0.0.1", 0)
    ready, loops = threading.Event(), []

    async def main() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        client = EngineClient(config, run_scripted)
        await client.start()
        app = create_app(Service(config, client, tokenizer, ServerMetrics()))
        settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        server = HttpServer(settings, ready.set)
        serving = asyncio.create_task(server.serve([listening]))
        await stop.wait()
        server.should_exit = True
        await serving
        await client.shutdown(0.0)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="http-server")
    thread.start()
    try:
        assert ready.wait(30), "the server did not start"
        with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=30) as client:
            yield client
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        listening.close()
