"""Hints for the cache over HTTP, to a real server of three tiers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.e2e.conftest import ADMIN_KEY, tiny_flags

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import ServerProcess

STORY = "Once upon a time there was a lighthouse keeper who counted ships. " * 4


def post(running: ServerProcess, path: str, **body: Any) -> Any:
    response = httpx.post(f"{running.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def hinted_pages(running: ServerProcess) -> int:
    return int(httpx.get(f"{running.url}/cache/stats").json()["hicache_hinted_pages"])


def chat(running: ServerProcess, messages: Any) -> Any:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, extra_body={"ignore_eos": True})
    return answer.usage.prompt_tokens_details


def test_a_message_with_cache_control_keeps_the_prompt_up_to_there(tiny: ServerProcess) -> None:
    before = hinted_pages(tiny)
    system = {"role": "system", "content": STORY, "cache_control": {"type": "ephemeral", "ttl_s": 2}}
    chat(tiny, [system, {"role": "user", "content": "And then?"}])
    marked = post(tiny, "/tokenize", prompt=STORY)["count"] // 4
    assert hinted_pages(tiny) - before >= marked
    deadline_s = time.monotonic() + 20
    while hinted_pages(tiny) > before:
        assert time.monotonic() < deadline_s, "the pin did not end"
        time.sleep(0.1)


def test_a_text_part_may_carry_it_too(tiny: ServerProcess) -> None:
    before = hinted_pages(tiny)
    part = {"type": "text", "text": STORY + "!", "cache_control": {"type": "ephemeral", "ttl_s": 1}}
    chat(tiny, [{"role": "user", "content": [part]}])
    assert hinted_pages(tiny) > before


def test_pin_and_demote_say_what_they_did(tiny: ServerProcess) -> None:
    text = "A prefix that nobody else has. " * 8
    assert post(tiny, "/cache/pin", text=text, ttl_s=1) == {"tokens": len(text), "pinned_tokens": 0}
    post(tiny, "/generate", text=text, sampling_params={"max_new_tokens": 0})
    assert post(tiny, "/cache/pin", text=text, ttl_s=1)["pinned_tokens"] == len(text) // 4 * 4
    assert post(tiny, "/cache/demote", text=text)["demoted_tokens"] == 0  # it is pinned
    time.sleep(1.5)
    assert post(tiny, "/cache/demote", text=text)["demoted_tokens"] == len(text) // 4 * 4
    details = post(tiny, "/generate", text=text, sampling_params={"max_new_tokens": 1}, return_cached_tokens_details=True)
    assert details["meta_info"]["cached_tokens_details"]["host"] > 0


def test_a_chat_can_be_named_by_its_messages(tiny: ServerProcess) -> None:
    messages = [{"role": "user", "content": STORY + "?"}]
    chat(tiny, messages)
    answer = post(tiny, "/cache/pin", messages=messages, ttl_s=1)
    assert answer["tokens"] - 4 < answer["pinned_tokens"] <= answer["tokens"]


@pytest.mark.long  # two starts; tests/unit/test_hints.py does the same without HTTP
def test_a_prefix_is_brought_up_after_a_restart(server: Callable[..., ServerProcess], tiny_model: Path, tmp_path: Path) -> None:
    flags = tiny_flags(tiny_model, tmp_path / "store")
    first = server(*flags)
    post(first, "/generate", text=STORY, sampling_params={"max_new_tokens": 1})
    assert first.stop() == 0
    second = server(*flags)
    assert post(second, "/cache/prefetch", text=STORY)["cached_tokens"] == 0
    deadline_s = time.monotonic() + 20
    while post(second, "/cache/prefetch", text=STORY)["cached_tokens"] < len(STORY) // 4 * 4:
        assert time.monotonic() < deadline_s, "it did not come up"
        time.sleep(0.05)
    assert httpx.post(f"{second.url}/flush_cache", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pin", {"text": "a"}),
        ("pin", {"text": "a", "ttl_s": 0}),
        ("pin", {"text": "a", "ttl_s": 1e9}),
        ("demote", {}),
        ("demote", {"text": "a", "input_ids": [1]}),
        ("prefetch", {"input_ids": [10**8]}),
        ("prefetch", {"text": ""}),
        ("prefetch", {"messages": []}),
        ("prefetch", {"text": "a", "priority": 1}),
    ],
)
def test_a_bad_hint_is_400(tiny: ServerProcess, path: str, body: Any) -> None:
    response = httpx.post(f"{tiny.url}/cache/{path}", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
