"""The main job against the real server: conversations that outgrow the device, then the host, then a restart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import ServerProcess

MODEL = ("--model-path", "smollm2", "--served-model-name", "smollm2", "--dtype", "float32", "--max-total-tokens", "1024")
TOPICS = ("a lighthouse", "a bakery", "the tide", "an old clock", "two rivers", "a night train")
QUESTIONS = ("Tell it in one sentence.", "Now say it in other words.", "And what happens next?")


@dataclass
class Conversation:
    """A chat with the server, and what each turn's usage said."""

    client: openai.OpenAI
    messages: list[dict[str, str]]
    usages: list[Any] = field(default_factory=list)

    def turn(self, question: str) -> str:
        self.messages.append({"role": "user", "content": question})
        answer = self.client.chat.completions.create(model="smollm2", messages=self.messages, max_tokens=10, temperature=0)
        text = answer.choices[0].message.content
        self.messages.append({"role": "assistant", "content": text})
        self.usages.append(answer.usage)
        return text


def conversations(url: str) -> list[Conversation]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    out = []
    for topic in TOPICS:
        story = " ".join(f"{i}. This is part {i} of a long story about {topic}; keep it in mind." for i in range(1, 16))
        out.append(Conversation(client, [{"role": "system", "content": story}]))
    return out


def recount(usages: list[Any]) -> Counter[str]:
    """What the server's counters must say after these answers."""
    out: Counter[str] = Counter()
    for usage in usages:
        out["lookup"] += usage.prompt_tokens
        details = usage.prompt_tokens_details.cached_tokens_details
        for tier in ("device", "host", "disk"):
            out[tier] += details[tier]
        out["miss"] += usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    return out


def counted(url: str) -> Counter[str]:
    """The same from /metrics, read by Prometheus's own parser."""
    out: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            match sample.name:
                case "hicache_lookup_tokens_total":
                    out["lookup"] += int(sample.value)
                case "hicache_miss_tokens_total":
                    out["miss"] += int(sample.value)
                case "hicache_hit_tokens_total":
                    out[sample.labels["tier"]] += int(sample.value)
    return out


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Three tiers, each smaller than the conversations but the disk."""
    return [
        *MODEL, "--enable-hierarchical-cache", "--hicache-ratio", "1.25", "--enable-cache-report",
        "--hicache-storage-backend", "lmdb", "--hicache-storage-dir", str(tmp_path / "store"), "--hicache-storage-size", "1GB",
        "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}',
    ]  # fmt: skip


@pytest.mark.timeout(900)
def test_conversations_move_through_all_tiers_and_survive_a_restart(
    server: Callable[..., ServerProcess], flags: list[str]
) -> None:
    plain = server(*MODEL, "--disable-radix-cache")
    expected = [[talk.turn(question) for question in QUESTIONS] for talk in conversations(plain.url)]
    assert plain.stop() == 0

    first = server(*flags)
    talks = conversations(first.url)
    answers = [[talk.turn(QUESTIONS[0])] for talk in talks]
    for talk, said in zip(talks, answers, strict=True):
        said.append(talk.turn(QUESTIONS[1]))
        before, now = talk.usages
        assert now.prompt_tokens_details.cached_tokens >= 0.9 * (before.prompt_tokens + before.completion_tokens)
    counts = recount([usage for talk in talks for usage in talk.usages])
    assert counts["host"] > 0
    assert counts["disk"] > 0
    assert counted(first.url) == counts
    stats = httpx.get(f"{first.url}/cache/stats").json()
    assert stats["hicache_hit_tokens_total"] == {tier: counts[tier] for tier in ("device", "host", "disk")}
    assert first.stop() == 0

    second = server(*flags)
    client = openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0, timeout=120)
    for talk, said in zip(talks, answers, strict=True):
        talk.client = client
        said.append(talk.turn(QUESTIONS[2]))
        before, now = talk.usages[-2:]
        assert now.prompt_tokens_details.cached_tokens >= 0.9 * (before.prompt_tokens + before.completion_tokens)
    assert talks[0].usages[-1].prompt_tokens_details.cached_tokens_details["disk"] > 0
    assert answers == expected
