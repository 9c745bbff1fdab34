"""Keys, the death of the engine, refusals at start, and stopping: each with a server of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from engine.config import ServeConfig
from tests.e2e.conftest import ServerProcess, free_port
from tests.http_server import http_server

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, sys
from engine.cli.serve import announce
from engine.config import ServeConfig
from engine.server.run import serve
from tests.scripted_engine import run_scripted
config = ServeConfig(model_path="smollm2", port=int(sys.argv[1]), drain_timeout=float(sys.argv[2]), page_size=7)
asyncio.run(serve(config, run_scripted, announce))
"""


def scripted_process(folder: Path, drain_timeout: float) -> ServerProcess:
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-c", PROGRAM, str(port), str(drain_timeout)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    running = ServerProcess(process, f"http://127.0.0.1:{port}", log)
    running.wait_until_healthy()
    return running


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
        response = http.post("/v1/completions", headers={"content-length": str(1 << 40)}, content=b"{}")
        assert response.status_code == 413


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


def test_sigterm_lets_a_running_request_finish_and_exits_0(tmp_path):
    running = scripted_process(tmp_path, drain_timeout=20)
    with httpx.stream(
        "POST", f"{running.url}/generate", json={"text": "one two " * 20, "extra_key": "slow", "stream": True}
    ) as r:
        lines = r.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert running.stop() == 0
    assert "Traceback" not in running.output


def test_sigterm_cuts_off_what_does_not_finish_in_time_and_exits_0(tmp_path):
    running = scripted_process(tmp_path, drain_timeout=1)
    body = {"text": "one two", "extra_key": "mute"}
    threading.Timer(0.3, running.process.send_signal, [signal.SIGTERM]).start()
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{running.url}/generate", json=body, timeout=30).raise_for_status()
    assert running.stop() == 0


def test_the_start_says_what_runs_and_how_to_try_it(tmp_path):
    running = scripted_process(tmp_path, drain_timeout=1)
    assert running.stop(signal.SIGINT) == 0
    assert "serves smollm2 on" in running.output
    assert "--page-size 7" in running.output
    assert f"curl {running.url}/v1/chat/completions" in running.output


def test_the_engine_ends_when_the_server_is_killed(tmp_path):
    import psutil

    running = scripted_process(tmp_path, drain_timeout=1)
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
