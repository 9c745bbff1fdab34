"""`hicache bench store` prints every figure once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from typer.testing import CliRunner

from engine.cli import bench_store

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_bench_store_prints_a_line_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_store, "PAGES_BY_KIB", {64: 20, 360: 6, 2048: 2})
    monkeypatch.setattr(bench_store, "_POOL_BYTES", 8 << 20)
    app = typer.Typer()
    app.command()(bench_store.store)
    done = CliRunner().invoke(app, ["--json", "--folder", str(tmp_path), "--runs", "1"])
    assert done.exit_code == 0, done.output
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    cases = {(figure["subject"], figure["page_kib"], figure["op"]) for figure in figures}
    expected = {(s, k, o) for s in ("lmdb", "raw", "memcpy") for k in (64, 360, 2048) for o in ("write", "read")}
    assert cases == expected
    assert len(figures) == len(expected)
    assert all(figure["gib_s"] > 0 for figure in figures)
    assert "lmdb" in CliRunner().invoke(app, ["--folder", str(tmp_path), "--runs", "1"]).stdout
    assert CliRunner().invoke(app, ["--sync", "sometimes"]).exit_code == 2
    assert not list(tmp_path.iterdir())
