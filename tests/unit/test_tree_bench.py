"""`hicache bench tree --pages`: what it builds is what it says, and its figures are of that."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from engine.cli.main import app


def test_a_large_tree_is_compared_with_a_small_one() -> None:
    result = CliRunner().invoke(app, ["bench", "tree", "--pages", "20000", "--json"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {line["op"] for line in lines} == {"bytes a page", "match", "evict one page"}
    assert all(line["small"] > 0 and line["large"] > 0 and line["pages"] == 20_000 for line in lines)
    memory = {line["shape"]: line["large"] for line in lines if line["op"] == "bytes a page"}
    assert memory["history-64-p16"] < memory["history-16-p16"] < memory["history-4-p16"]
    assert 26 < memory["history-64-p16"] < 150  # a row of the page table alone is 26
