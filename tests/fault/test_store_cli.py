"""`hicache store`: what people and scripts see."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli.main import app

sys.path.insert(0, str(Path(__file__).parent))
import store_load as load

PAGES = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = load.open_store(tmp_path / "store")
    for number in range(6):
        load.write(store, load.chain(number, 4))
    store.close()
    return tmp_path / "store"


def run(status: int, *arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["store", *(str(argument) for argument in arguments)])
    assert done.exit_code == status, done.output
    return done.stdout


def damage(folder: Path) -> None:
    path = next(folder.glob("slab-*.bin"))
    with path.open("r+b") as file:
        file.seek(9_000)
        file.write(b"damage")


def test_stat_shows_each_namespace(folder: Path) -> None:
    fields = json.loads(run(0, "stat", folder, "--json"))
    assert fields["pages"] == PAGES
    assert fields["bytes"] <= fields["capacity_bytes"] == load.CAPACITY
    (space,) = fields["namespaces"]
    assert space["info"] == {"digest": load.NAMESPACE.hex(), "tenant": "", "labels": {"model": "test"}}
    assert (space["pages"], space["tokens"]) == (PAGES, PAGES * 64)
    said = run(0, "stat", folder)
    assert f"{PAGES} pages" in said
    assert "model=test" in said


def test_check_ends_with_1_on_damage_and_scrub_repairs(folder: Path) -> None:
    assert "sound" in run(0, "check", folder)
    damage(folder)
    fields = json.loads(run(1, "check", folder, "--json"))
    assert not fields["sound"]
    assert [bad["reason"] for bad in fields["bad"]] == ["wrong checksum"]
    assert "damaged: 1 pages" in run(1, "check", folder)
    assert json.loads(run(0, "scrub", folder, "--json"))["deleted"] == 1
    assert json.loads(run(0, "check", folder, "--json"))["pages"] == PAGES - 1
    assert "deleted 0 pages" in run(0, "scrub", folder)


def test_clear_takes_a_namespace_or_an_age(folder: Path) -> None:
    assert json.loads(run(0, "clear", folder, "--older-than", "1h", "--json")) == {"cleared_pages": 0}
    run(2, "clear", folder, "--namespace", "ffff")
    run(2, "clear", folder, "--older-than", "soon")
    run(2, "clear", folder, "--older-than", "1h", "--namespace", "00")
    assert f"deleted {PAGES} pages" in run(0, "clear", folder, "--namespace", load.NAMESPACE.hex()[:6])
    assert json.loads(run(0, "stat", folder, "--json"))["pages"] == 0


def test_compact_tells_what_it_gave_back(folder: Path) -> None:
    store = load.open_store(folder)
    store.delete([ref.key for ref in load.chain(5, 4)])
    store.close()
    fields = json.loads(run(0, "compact", folder, "--json"))
    assert fields["bytes_after"] < fields["bytes_before"]
    assert "on disk before" in run(0, "compact", folder)


def test_what_is_not_a_store_is_told_in_one_line(tmp_path: Path) -> None:
    for command in ("stat", "check", "scrub", "clear", "compact"):
        done = CliRunner().invoke(app, ["store", command, str(tmp_path / "nothing")])
        assert done.exit_code == 2
        (said,) = done.output.splitlines()
        assert said.startswith("error: ")
    assert not (tmp_path / "nothing").exists()
