"""SGLang's frontend language as a client: forks, a judge that reads them all, select, regex, streaming and batches."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.conftest import servers, tiny_flags
from tests.e2e.environments import environment_with

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import ServerProcess

PROGRAM = Path(__file__).parent / "programs" / "sglang_program.py"
CONTEXT = "The keeper of the lighthouse wrote down every ship that passed, its flag, its course and the weather. " * 4

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, model_cache: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sglang")
    with servers(folder, model_cache) as start:
        running: ServerProcess = start(*tiny_flags(tiny_model, folder / "store"))
        yield running.url


@pytest.fixture(scope="module")
def brought(server_url: str) -> Any:
    """What the programs brought."""
    python = environment_with("sglang-0.4.1", "sglang==0.4.1")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, PROGRAM, server_url], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_context_that_three_forks_and_a_judge_share_is_computed_once(brought: Any) -> None:
    context = len(CONTEXT)  # one token a character
    assert brought["tokens"]["lookup"] > 5 * context
    assert brought["tokens"]["miss"] < 1.5 * context


def test_the_judge_reads_what_all_three_wrote(brought: Any) -> None:
    assert brought["text"].startswith(CONTEXT)
    assert brought["text"].count(" | ") >= 2
    assert brought["text"].endswith(brought["verdict"])
    assert brought["meta"]["completion_tokens"] == 8


def test_select_takes_the_choice_that_the_model_finds_likeliest(brought: Any, server_url: str) -> None:
    choices, prefix = ["one", "two", "three"], CONTEXT + "\nThe best ship is "
    body = {
        "text": [prefix + choice for choice in choices],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(prefix) - 1,
    }
    answers = httpx.post(f"{server_url}/generate", json=body, timeout=60).json()
    means = [answer["meta_info"]["normalized_prompt_logprob"] for answer in answers]
    assert brought["scores"] == pytest.approx(means, abs=1e-4)
    assert brought["chosen"] == choices[means.index(max(means))]


def test_a_regex_holds(brought: Any) -> None:
    assert len(brought["number"]) == 3
    assert brought["number"].isdigit()


def test_a_stream_adds_up_to_the_whole(brought: Any) -> None:
    assert "".join(brought["pieces"]) == brought["whole"]
    assert len(brought["pieces"]) > 3
    assert len(brought["batch"]) == 4
