"""The one run of everything that needs a GPU: its report, and a rehearsal of it without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.figures import Figure, emit, parse
from benchmarks.gpu.wheels import lacking

ROOT = Path(__file__).parents[2]


def run(out: Path, *only: str, minutes: str = "7") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--minutes", minutes, "--out", str(out)]
    return subprocess.run([*command, "--only", *only], cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_figure_is_read_as_it_was_reported_among_other_output(capsys):
    figure = Figure("decode", "a step", 1.5, "ms", 2.0, raw={"all": [1.0, 2.0]})
    print("loading")
    emit(figure)
    assert parse(capsys.readouterr().out) == [figure]


def test_a_figure_knows_whether_it_keeps_its_limit():
    figure = Figure("part", "what", 1.05, "x", 1.05)
    assert (figure.verdict, figure.promise) == ("ok", "<= 1.05")
    assert figure._replace(value=1.06).verdict == "MISSED"
    assert figure._replace(value=1.06, at_least=True).verdict == "ok"
    assert figure._replace(limit=None).verdict == ""


def test_only_wheels_of_packages_that_are_not_there_are_unpacked(tmp_path):
    for wheel in ("msgspec-0.1-py3-none-any.whl", "Typing_Extensions-9-py3-none-any.whl", "not_a_package-1-py3-none-any.whl"):
        (tmp_path / wheel).touch()
    assert [wheel.name for wheel in lacking(tmp_path)] == ["not_a_package-1-py3-none-any.whl"]


def test_a_rehearsal_writes_a_table_and_the_raw_figures(tmp_path):
    done = run(tmp_path, "attention", "decode")
    assert "blobs / dense" in done.stdout
    assert "the figures mean nothing" in done.stdout
    assert (tmp_path / "table.txt").read_text() == done.stdout
    parts = json.loads((tmp_path / "figures.json").read_text())["parts"]
    assert [(part["name"], part["state"]) for part in parts] == [("attention", "ok"), ("decode", "ok")]
    assert all(figure["value"] > 0 for part in parts for figure in part["figures"])


def test_a_run_that_is_out_of_time_says_what_it_left_out_and_fails(tmp_path):
    done = run(tmp_path, "decode", minutes="0.01")
    assert done.returncode == 1
    assert "left out" in done.stdout


@pytest.mark.long
def test_every_part_can_be_rehearsed(tmp_path):
    done = run(tmp_path, "compile", "parity", "copies", "attention", "decode", "multiturn")
    assert "failed" not in done.stdout, done.stdout
    for what in ("gemma2", "scattered", "without graphs", "from disk", "kept after closing"):
        assert what in done.stdout
