"""`hicache bench copy` prints every figure once, and draws them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from typer.testing import CliRunner

from engine.cli import bench_copy, copy_speed

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_bench_copy_prints_a_line_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench_copy, copy_speed):
        monkeypatch.setattr(module, "PAGE_KIB", (64, 256))
    app = typer.Typer()
    app.command()(bench_copy.copy)
    flags = ["--device", "cpu", "--moved-mib", "2", "--runs", "1"]
    done = CliRunner().invoke(app, [*flags, "--json"])
    assert done.exit_code == 0, done.output
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    want = [(k, op, p) for k in (64, 256) for op in ("backup", "load_back") for p in ("coalesced", "scattered")]
    assert [(figure["page_kib"], figure["op"], figure["pattern"]) for figure in figures] == want
    assert all(figure["gib_s"] > 0 and figure["limit_gib_s"] > 0 for figure in figures)
    png = tmp_path / "copy.png"
    shown = CliRunner().invoke(app, [*flags, "--plot", str(png)])
    assert shown.stdout.count("KiB") == len(want)
    assert "memcpy" in shown.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_bench_copy_refuses_what_is_not_there() -> None:
    app = typer.Typer()
    app.command()(bench_copy.copy)
    assert CliRunner().invoke(app, ["--device", "tpu"]).exit_code == 2
    refused = CliRunner().invoke(app, ["--device", "cpu", "--io-backend", "kernel"])
    assert refused.exit_code == 2
    assert "--hicache-io-backend kernel needs a GPU" in refused.output
