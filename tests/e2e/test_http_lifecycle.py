"""Keys, the death of the engine, refusals at start, and stopping: each with a server of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil
import pytest

from engine.client import EngineClient
from engine.config import ServeConfig
from engine.server.app import create_app
from engine.server.guard import MAX_BODY_BYTES
from engine.server.metrics import ServerMetrics
from engine.server.service import Service
from tests.e2e.conftest import ServerProcess, free_port
from tests.http_server import http_server
from tests.scripted_engine import run_scripted

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, sys
from engine.cli.serve import announce
from engine.config import ServeConfig
from engine.server.run import serve
from tests.scripted_engine import run_scripted
config = ServeConfig(model_path=sys.argv[1], port=int(sys.argv[2]), drain_timeout=float(sys.argv[3]), page_size=7)
asyncio.run(serve(config, run_scripted, announce))
"""


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Path:
    """A folder with the tokenizer alone, which loads faster than a GGUF file."""
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(path)
    return path


@pytest.fixture
def scripted(folder, tmp_path):
    """Start server processes before a scripted engine; kill what is left of them at the end."""
    started: list[ServerProcess] = []

    def start(drain_timeout: float) -> ServerProcess:
        port, log = free_port(), tmp_path / "log"
        command = [sys.executable, "-c", PROGRAM, str(folder), str(port), str(drain_timeout)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        running = ServerProcess(process, f"http://127.0.0.1:{port}", log)
        started.append(running)
        running.wait_until_healthy()
        return running

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()


def refused(*flags: str) -> str:
    """Run a server that is refused; returns what it said."""
    hicache = Path(sys.executable).with_name("hicache")
    done = subprocess.run([hicache, "serve", *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_keys_close_what_they_should(tokenizer):
    config = ServeConfig(model_path="smollm2", api_key="user", admin_api_key="admin")
    with http_server(config, tokenizer) as http:

        def status(method: str, path: str, key: str | None = None) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return http.request(method, path, headers=headers).status_code

        assert [status("GET", "/v1/models", key) for key in (None, "wrong", "user", "admin")] == [401, 401, 200, 200]
        assert [status("POST", "/flush_cache", key) for key in (None, "user", "admin")] == [401, 401, 200]
        assert [status("GET", path) for path in ("/health", "/metrics")] == [200, 200]
        assert http.get("/v1/models").json()["error"]["code"] == "invalid_api_key"


def test_an_admin_key_alone_closes_admin_endpoints_alone(tokenizer):
    with http_server(ServeConfig(model_path="smollm2", admin_api_key="admin"), tokenizer) as http:
        assert http.get("/v1/models").status_code == 200
        assert http.get("/flush_cache").status_code == 401


def test_a_body_that_is_too_large_is_refused_unread(tokenizer):
    with http_server(ServeConfig(model_path="smollm2"), tokenizer) as http:
        connection = HTTPConnection(http.base_url.host, http.base_url.port, timeout=10)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


async def test_a_body_of_unknown_length_is_read_up_to_the_limit(tokenizer):
    async def too_much():
        for _ in range(1 + (MAX_BODY_BYTES >> 20)):
            yield b" " * (1 << 20)

    config = ServeConfig(model_path="smollm2")
    app = create_app(Service(config, EngineClient(config, run_scripted), tokenizer, ServerMetrics()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        response = await http.post("/v1/completions", content=too_much())
    assert response.status_code == 413
    assert "16 MiB" in response.json()["error"]["message"]


def test_the_cache_report_splits_by_tier(tokenizer):
    with http_server(ServeConfig(model_path="smollm2", enable_cache_report=True), tokenizer) as http:
        usage = http.post("/v1/completions", json={"prompt": "one"}).json()["usage"]
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 7,
        "cached_tokens_details": {"device": 4, "host": 2, "disk": 1},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_the_death_of_the_engine_is_503_for_all_and_bad_health(tokenizer, stream):
    with http_server(ServeConfig(model_path="smollm2"), tokenizer) as http:
        waiting: list[httpx.Response] = []
        body = {"prompt": "one", "extra_key": "mute", "stream": stream}
        thread = threading.Thread(target=lambda: waiting.append(http.post("/v1/completions", json=body)))
        thread.start()
        while not http.get("/get_server_info").json()["in_flight"]:
            pass
        assert http.post("/v1/completions", json={"prompt": "one", "extra_key": "die"}).status_code == 503
        thread.join(10)
        assert waiting[0].status_code == 503
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "one"}).status_code == 503
        assert http.get("/cache/stats").status_code == 503
        assert "hicache_http_requests_total" in http.get("/metrics").text


def test_the_death_of_the_engine_in_a_stream_is_an_error_event(tokenizer):
    with http_server(ServeConfig(model_path="smollm2"), tokenizer) as http:
        response = http.post("/v1/completions", json={"prompt": "one two", "extra_key": "die-later", "stream": True})
    assert response.status_code == 200
    parts = response.text.removesuffix("\n\n").split("\n\n")
    assert '"text":"one"' in parts[0]
    assert "engine_dead" in parts[-2]
    assert parts[-1] == "data: [DONE]"


def test_a_server_says_what_runs_and_on_sigterm_lets_requests_finish_and_exits_0(scripted):
    running = scripted(drain_timeout=20)
    assert "--page-size 7" in running.output
    assert f"curl {running.url}/v1/chat/completions" in running.output
    body = {"text": "one two " * 20, "extra_key": "slow", "stream": True}
    with httpx.stream("POST", f"{running.url}/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["meta_info"]["finish_reason"] == {"type": "stop"}
    assert running.stop() == 0
    assert "Traceback" not in running.output


def test_what_does_not_finish_in_time_after_sigint_is_aborted_and_the_server_exits_0(scripted):
    running = scripted(drain_timeout=0.5)
    body = {"text": "one two", "extra_key": "mute"}
    threading.Timer(0.3, running.process.send_signal, [signal.SIGINT]).start()
    answer = httpx.post(f"{running.url}/generate", json=body, timeout=30).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "abort"}
    assert running.stop() == 0
    assert "Traceback" not in running.output


def test_the_engine_ends_when_the_server_is_killed(scripted):
    running = scripted(drain_timeout=1)
    children = psutil.Process(running.process.pid).children(recursive=True)
    assert children
    assert running.stop(signal.SIGKILL) == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_a_bad_flag_is_one_line_and_status_2():
    assert "--page-size 0" in refused("--model-path", "smollm2", "--page-size", "0")


def test_an_unknown_model_is_one_line_and_status_2():
    assert "no-such-model" in refused("--model-path", "no-such-model")


def test_a_port_in_use_is_one_line_and_status_2():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in refused("--model-path", "smollm2", "--port", port)
