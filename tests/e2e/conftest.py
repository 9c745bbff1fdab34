"""Servers for end-to-end tests: the real process (`server`), and the HTTP side before a scripted engine (`http`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from engine.config import ServeConfig
from engine.tokenizer import Tokenizer, load_tokenizer, resolve_model
from tests.http_server import http_server
from tests.models import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
ADMIN_KEY = "let-me-in"
HICACHE = Path(sys.executable).with_name("hicache")


@dataclass
class ServerProcess:
    """A running `hicache serve`. `log` is the file with all that it has written."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def output(self) -> str:
        """What the process has written so far."""
        return self.log.read_text(errors="replace")

    def wait_until_healthy(self) -> None:
        """Return once /health answers; fail with the output if the process ends or takes too long."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                pytest.fail(f"hicache serve ended with {self.process.returncode}:\n{self.output}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        pytest.fail(f"no health within {START_TIMEOUT_S} s:\n{self.output}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for all servers, since converting the model takes its time. Stores are each test's own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def server(tmp_path: Path, model_cache: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Start real servers: `server("--config", path, env={...})` returns one that answers; all are stopped at the end.

    Each gets a free port, and the session's cache folder unless `env` says otherwise.
    """
    with servers(tmp_path, model_cache) as start:
        yield start


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with one token a byte: it starts and answers at once."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, model_cache: Path) -> Iterator[ServerProcess]:
    """A server of the tiny model over three tiers, shared by all tests that change nothing for good."""
    folder = tmp_path_factory.mktemp("server")
    with servers(folder, model_cache) as start:
        yield start(*tiny_flags(tiny_model, folder / "store"))


def tiny_flags(model: Path, store: Path) -> list[str]:
    """Flags of a server of the tiny model."""
    return [
        "--model-path", str(model), "--served-model-name", "tiny", "--device", "cpu", "--page-size", "4",
        "--max-total-tokens", "16384", "--enable-hierarchical-cache", "--enable-cache-report",
        "--hicache-storage-backend", "lmdb", "--hicache-storage-dir", str(store), "--hicache-storage-size", "200MB",
        "--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}', "--admin-api-key", ADMIN_KEY,
        "--log-level", "debug",
    ]  # fmt: skip


@contextmanager
def servers(tmp_path: Path, model_cache: Path) -> Iterator[Callable[..., ServerProcess]]:
    """What starts servers; all are stopped at the end."""
    started: list[ServerProcess] = []

    def start(*flags: str, env: Mapping[str, str] | None = None) -> ServerProcess:
        port, log = free_port(), tmp_path / f"server-{len(started)}.log"
        command = [str(HICACHE), "serve", "--port", str(port), *flags]
        environment = {**os.environ, "XDG_CACHE_HOME": str(model_cache), **(env or {})}
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        running = ServerProcess(process, f"http://127.0.0.1:{port}", log)
        started.append(running)
        running.wait_until_healthy()
        return running

    try:
        yield start
    finally:
        for running in started:
            try:
                running.stop()
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The demo model's tokenizer."""
    return load_tokenizer(resolve_model("smollm2").resolve())


@pytest.fixture(scope="module")
def http(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    """A client of the HTTP side before a scripted engine, shared by a module."""
    config = ServeConfig(model_path="smollm2", served_model_name="scripted", max_queued_requests=200)
    with http_server(config, tokenizer) as client:
        yield client


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
