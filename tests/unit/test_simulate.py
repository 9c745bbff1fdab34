"""Traces replayed through the cache, against counts made by hand and by exhaustive search."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.cli.main import app
from hicache.belady import belady_hits
from hicache.errors import ConfigError
from hicache.simulate import Sizes, replay
from hicache.traces import Request, Trace, read_trace

REAL = Path(os.environ.get("HICACHE_TRACES", "nowhere")) / "mooncake_conversation.jsonl"


def trace_of(*requests: list[int]) -> Trace:
    """Requests a second apart; an id stands for one block behind one prefix."""
    made = [Request(float(at), 512 * len(blocks), 1, np.array(blocks, np.int32)) for at, blocks in enumerate(requests)]
    return Trace(made, max(max(blocks) for blocks in requests))


def written(path: Path, *requests: list[int]) -> Path:
    lines = [
        json.dumps({"timestamp": 1000 * at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
        for at, ids in enumerate(requests)
    ]
    path.write_text("\n".join(lines))
    return path


A, B, C = [1, 2, 3], [4, 5, 6], [7, 8]


def test_lru_drops_the_end_of_the_oldest_path_first() -> None:
    outcome = replay(trace_of(A, B, C, A), Sizes(7))  # C takes blocks 3 and ... of A: 8 blocks in 7 slots
    assert [hits.total for hits in outcome.hits] == [0, 0, 0, 2]


def test_a_used_prefix_does_not_refresh_what_lies_behind_it() -> None:
    outcome = replay(trace_of([1, 2, 3, 4], B, [1, 2], C, [1, 2, 3, 4]), Sizes(8))
    assert [hits.total for hits in outcome.hits] == [0, 0, 2, 0, 3]


def test_an_endless_cache_hits_all_but_first_sights() -> None:
    outcome = replay(trace_of(A, B, A, [1, 2, 9], B), Sizes(100))
    assert outcome.hit_share == (outcome.blocks - 7) / outcome.blocks


def test_hits_are_told_by_tier() -> None:
    trace = trace_of(A, B, C, A)
    assert replay(trace, Sizes(3, 9)).by_tier == (0, 3, 0)
    assert replay(trace, Sizes(3, 3, 20)).by_tier == (0, 0, 3)
    assert replay(trace, Sizes(8, 9)).by_tier == (3, 0, 0)


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_every_block_is_hit_at_most_once_a_request(write_policy: str) -> None:
    rng = np.random.default_rng(1)
    paths = [list(range(20 * i + 1, 20 * i + 1 + int(rng.integers(2, 20)))) for i in range(12)]
    trace = trace_of(*(paths[int(i)] for i in rng.integers(0, 12, 300)))
    for eviction in ("lru", "adaptive", "slru"):
        outcome = replay(trace, Sizes(40, 60, 80), eviction, write_policy)  # type: ignore[arg-type]
        assert all(hits.total <= len(request.blocks) for hits, request in zip(outcome.hits, trace.requests, strict=True))
        assert 0 < outcome.hit_share <= belady_hits(trace, 180, 40) / trace.blocks


def test_of_a_request_longer_than_the_device_the_front_is_kept() -> None:
    assert replay(trace_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]), Sizes(3)).by_tier == (3, 0, 0)


def test_selective_write_through_remembers_blocks_that_were_evicted() -> None:
    requests = [A, B, C, A, B, C, A]
    outcome = replay(trace_of(*requests), Sizes(3, 12), "lru", "write_through_selective")
    assert [hits.host for hits in outcome.hits] == [0, 0, 0, 0, 0, 0, 3]


def test_second_sight_keeps_what_is_asked_once_from_the_disk() -> None:
    trace = trace_of(A, B, C, A, B)
    every = replay(trace, Sizes(3, 3, 20))
    twice = replay(trace, Sizes(3, 3, 20), storage_admission="second-sight")
    assert every.disk_written == 8
    assert 0 < twice.disk_written < 8
    again = replay(trace_of(A, B, C, A, B, C, A, B, C), Sizes(3, 3, 20), storage_admission="second-sight")
    assert again.by_tier[2] > 0


def optimum(trace: Trace, capacity: int) -> int:
    """The most hits any leaf-first eviction can get, by trying all of them."""
    parents = {int(b): int(a) for r in trace.requests for a, b in zip([0, *r.blocks.tolist()], r.blocks.tolist(), strict=False)}

    @cache
    def best(at: int, resident: frozenset[int]) -> int:
        if at == len(trace.requests):
            return 0
        blocks = trace.requests[at].blocks.tolist()
        found = next((i for i, block in enumerate(blocks) if block not in resident), len(blocks))
        return found + max(best(at + 1, kept) for kept in cut(resident | set(blocks), frozenset(blocks)))

    def cut(resident: frozenset[int], pinned: frozenset[int]) -> set[frozenset[int]]:
        states = {frozenset(resident)}
        for _ in range(len(resident) - capacity):
            states = {
                state - {leaf}
                for state in states
                for leaf in state
                if leaf not in pinned and all(parents[other] != leaf for other in state)
            }
        return states

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(8))
def test_belady_is_the_best_of_all_leaf_first_evictions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    paths = [[1, 2, 3], [1, 2, 4], [1, 5], [6, 7], [8]]
    trace = trace_of(*(paths[int(i)] for i in rng.integers(0, len(paths), 9)), [1, 2, 3, 4, 5, 6, 7, 8][:1])
    assert belady_hits(trace, 4) == optimum(trace, 4)


def test_blocks_are_told_by_their_whole_prefix(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t.jsonl", [7, 9], [8, 9], [7, 9, 9]))
    assert [request.blocks.tolist() for request in trace.requests] == [[1, 2], [3, 4], [1, 2, 5]]
    assert (trace.unique_blocks, trace.blocks) == (5, 7)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no requests"),
        ("{", "line 1"),
        ('{"timestamp": 0, "input_length": 3}', "`hash_ids`"),
        ('{"timestamp": 0, "input_length": 3, "hash_ids": []}', "no request has a block"),
        ('{"timestamp": 0, "input_length": 3, "hash_ids": "x"}', "line 1.*hash_ids"),
        ('{"timestamp": 0, "input_length": -3, "hash_ids": [1]}', "line 1.*input_length"),
        ('{"timestamp": 0, "input_length": 1e400, "hash_ids": [1]}', "line 1"),
        ('{"timestamp": NaN, "input_length": 3, "hash_ids": [1]}', "line 1"),
        ("[]", "line 1"),
        ("\x00", "line 1"),
        ('{"timestamp": "x", "input_length": 3, "hash_ids": []}', "line 1"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_trace(tmp_path / "t.jsonl")


def test_disk_without_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="need host blocks"):
        replay(trace_of(A), Sizes(3, 0, 3))


def test_command_prints_a_json_line_a_configuration(tmp_path: Path) -> None:
    file = written(tmp_path / "t.jsonl", A, B, A, C, A)
    flags = ["--device-blocks", "3,8", "--host-blocks", "0,8", "--eviction", "lru,adaptive", "--plot", str(tmp_path / "p.png")]
    result = CliRunner().invoke(app, ["simulate", "--trace", str(file), *flags, "--json"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["device_blocks"], line["host_blocks"], line["eviction"]) for line in lines] == [
        (device, host, eviction) for device in (3, 8) for host in (0, 8) for eviction in ("lru", "adaptive")
    ]
    for line in lines:
        assert line["requests"] == 5
        assert line["blocks"] == 14
        assert line["hit_share"] == pytest.approx(sum(line["hit_share_by_tier"].values()))
        assert line["hit_share"] <= line["belady_hit_share"] <= 1
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_command_recommends_sizes(tmp_path: Path) -> None:
    file = written(tmp_path / "t.jsonl", A, B, A, C, A)
    result = CliRunner().invoke(app, ["simulate", "--trace", str(file), "--device-blocks", "3"])
    assert result.exit_code == 0, result.output
    assert "An infinite cache would hit 42.86 %" in result.stdout


def test_command_names_a_bad_flag(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", "--trace", str(tmp_path / "none"), "--device-blocks", "3,x"])
    assert result.exit_code == 2
    assert "--device-blocks 3,x" in result.output


@pytest.mark.parametrize(
    "flags", [["--plot", "/nowhere/p.png"], ["--plot", "p.txt"], ["--device-blocks", "99999999999999"]], ids=" ".join
)
def test_command_refuses_before_it_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    monkeypatch.setattr("hicache.simulate.replay", None)
    file = written(tmp_path / "t.jsonl", A, B)
    result = CliRunner().invoke(app, ["simulate", "--trace", str(file), *flags])
    assert result.exit_code == 2, result.exception
    assert " ".join(flags) in result.output


@pytest.mark.parametrize("command", ["engine", "overhead", "overlap"])
def test_a_model_that_is_not_there_is_one_line(command: str) -> None:
    result = CliRunner().invoke(app, ["bench", command, "--model-path", "no-such-model"])
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith("error: --model-path no-such-model: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(not REAL.exists(), reason="HICACHE_TRACES names no folder with mooncake_conversation.jsonl")
@pytest.mark.parametrize(
    ("capacity", "percent"), [(1000, 4.45), (5000, 11.18), (10_000, 21.16), (30_000, 32.57), (200_000, 36.64)]
)
def test_lru_on_a_published_trace(capacity: int, percent: float) -> None:
    assert round(100 * replay(read_trace(REAL), Sizes(capacity)).hit_share, 2) == percent
