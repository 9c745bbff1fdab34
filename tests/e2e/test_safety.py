"""Limits, timeouts, and a log that tells nobody what was asked."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from engine.config import ServeConfig
from tests.http_server import http_server

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer
    from tests.e2e.conftest import ServerProcess

SECRET = "xyzzy-plugh-7431"
CHAT: Any = [{"role": "user", "content": f"My secret is {SECRET}"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "description": SECRET}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "stream": True}),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [TOOL]}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET * 40, "content": SECRET}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": SECRET}]}]}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 2, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": SECRET, "stop": [SECRET], "max_tokens": 2}),
        ("/v1/completions", {"prompt": SECRET * 10_000}),
        ("/v1/completions", {"prompt": "a", "regex": f"{SECRET}[0-9"}),
        (
            "/v1/completions",
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {SECRET: 1}}}},
        ),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "cache_salt": SECRET}),
        ("/v1/completions", {"prompt": {SECRET: 1}}),
        ("/generate", {"text": SECRET, "sampling_params": {"max_new_tokens": 2}}),
        ("/generate", {"text": SECRET, "rid": SECRET, "sampling_params": {"temperature": SECRET}}),
        ("/tokenize", {"prompt": SECRET}),
        ("/cache/pin", {"text": SECRET, "ttl_s": 1}),
    ],
)
def test_nothing_of_a_prompt_is_logged_even_at_debug(tiny: ServerProcess, path: str, body: Any) -> None:
    response = httpx.post(f"{tiny.url}{path}", json=body, timeout=60)
    assert response.status_code in (200, 400), response.text
    request_id = response.headers["x-request-id"]
    deadline_s = time.monotonic() + 10
    while request_id not in tiny.output:  # the log says that there was a request, and which
        assert time.monotonic() < deadline_s, "the request is not in the log"
        time.sleep(0.02)
    assert SECRET not in tiny.output


def test_a_broken_body_is_not_logged(tiny: ServerProcess) -> None:
    response = httpx.post(f"{tiny.url}/generate", content=f'{{"text": "{SECRET}"', headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert SECRET not in tiny.output


def test_the_429_of_an_overloaded_server_says_when_to_come_back(tokenizer: Tokenizer) -> None:
    with http_server(ServeConfig(model_path="smollm2", max_queued_requests=2), tokenizer) as http:
        response = http.post("/v1/completions", json={"prompt": "a", "n": 3})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert http.post("/v1/completions", json={"prompt": "a", "n": 2}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(tokenizer: Tokenizer, stream: bool) -> None:
    with http_server(ServeConfig(model_path="smollm2", request_timeout=0.2), tokenizer) as http:
        response = http.post("/generate", json={"text": "one", "extra_key": "mute", "stream": stream, "rid": "slow"})
        assert response.status_code == 504
        assert "longer than 0.2 s" in response.json()["error"]["message"]
        assert http.get("/cache/stats").json()["aborted"] == ["slow"]
        assert http.post("/generate", json={"text": "one"}).json()["text"] == "one"


def test_a_body_that_stalls_is_not_waited_for(tokenizer: Tokenizer) -> None:
    with http_server(ServeConfig(model_path="smollm2", body_timeout=0.2), tokenizer) as http:
        with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=10) as stalling:
            stalling.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert b" 408 " in stalling.recv(4096).split(b"\r\n")[0]
        slow = {"text": "one two three", "extra_key": "slow"}  # a body that is there has all the time
        assert http.post("/generate", json={**slow, "text": "one " * 40}).status_code == 200


def test_a_text_that_can_not_fit_is_refused_before_it_is_tokenised(tokenizer: Tokenizer) -> None:
    with http_server(ServeConfig(model_path="smollm2"), tokenizer) as http:
        response = http.post("/v1/completions", json={"prompt": "a" * (8 << 20)})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
