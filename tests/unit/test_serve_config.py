"""The configuration: from the command line and a file, refused in one clear line, never rewritten."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli.main import app
from engine.config import ServeConfig, flag_of, load_config, parse_bytes
from hicache.errors import ConfigError

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text)
    return file


def refusal(**given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config({"model_path": "m", **given})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_sglangs():
    config = load_config({"model_path": "m"})
    assert (config.host, config.port) == ("127.0.0.1", 30000)
    assert (config.hicache_ratio, config.hicache_write_policy) == (2.0, "write_through")
    assert (config.schedule_policy, config.radix_eviction_policy) == ("fcfs", "lru")
    assert config.prefetch.policy == "timeout"
    assert (config.prefetch.threshold_tokens, config.prefetch.timeout_s(1024)) == (256, 1.25)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"page_size": "0"}, "--page-size 0"),
        ({"page_size": "sixteen"}, "--page-size sixteen"),
        ({"port": "70000"}, "--port 70000"),
        ({"schedule_policy": "best"}, "fcfs, lpm"),
        ({"radix_eviction_policy": "clock"}, "lru, lfu, slru, fifo, priority, adaptive"),
        ({"hicache_io_backend": "turbo"}, "--hicache-io-backend turbo"),
        ({"kv_cache_dtype": "int8"}, "float16, fp8_e4m3, fp8_e5m2"),
        ({"cuda_graph_max_bs": "64"}, "--max-running-requests 32"),
        ({"mem_fraction_static": "1.5"}, "--mem-fraction-static 1.5"),
        ({"context_length": "-1"}, "--context-length -1"),
        ({"hicache_storage_size": "lots"}, "--hicache-storage-size lots"),
        ({"hicache_storage_size": "10KB"}, "at least 1 MB"),
        ({"hicache_storage_backend_extra_config": "{"}, "--hicache-storage-backend-extra-config"),
        ({"hicache_storage_backend_extra_config": '{"prefetch_treshold": 1}'}, "prefetch_treshold"),
        ({"hicache_storage_backend_extra_config": "@/no/such/file"}, "No such file"),
        ({"hicache_storage_backend": "lmdb"}, "needs --enable-hierarchical-cache"),
        ({"hicache_storage_dir": "/x"}, "needs --hicache-storage-backend lmdb"),
        ({"enable_hierarchical_cache": True, "disable_radix_cache": True}, "--disable-radix-cache"),
        ({"api_key": ""}, "--api-key must not be empty"),
        ({"model_path": ""}, "--model-path is missing"),
    ],
)
def test_what_can_not_work_is_refused_by_its_flag(given, says):
    assert says in refusal(**given)


def test_the_command_line_overrides_the_file(tmp_path):
    file = write(tmp_path, "model-path: m\npage_size: 4\nport: 31000\n")
    config = load_config({"page_size": "8"}, file)
    assert (config.page_size, config.port) == (8, 31000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("page-sise: 4\n", "unknown flag page-sise (did you mean page-size?)"),
        ("page-size: 4\npage_size: 8\n", "given twice"),
        ("- a\n", "expected flags"),
        ("a: [\n", "not YAML"),
        ("enable-cache-report: 3\n", "--enable-cache-report 3"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, says):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config({"model_path": "m"}, file)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config({"model_path": "m"}, tmp_path / "none.yaml")


def test_extra_config_may_be_a_file_or_a_mapping(tmp_path):
    extra = tmp_path / "extra.json"
    extra.write_text(json.dumps({"prefetch_threshold": 9}))
    by_name = load_config({"model_path": "m", "hicache_storage_backend_extra_config": f"@{extra}"})
    file = write(tmp_path, "model-path: m\nhicache-storage-backend-extra-config:\n  prefetch_threshold: 9\n")
    assert by_name.prefetch == load_config({}, file).prefetch
    assert by_name.prefetch.threshold_tokens == 9


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("2", 2 << 30), ("2GB", 2 << 30), ("0.5", 1 << 29), ("500MB", 500 << 20), ("1.5TiB", 3 << 39), ("64b", 64), ("8k", 8192)],
)
def test_sizes_are_in_gb_or_have_a_unit(text, size_bytes):
    assert parse_bytes(text, flag="--x") == size_bytes


def test_the_configuration_crosses_to_another_process_whole():
    config = load_config({"model_path": "m", "api_key": "k", "hicache_size": "1.5"})
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.hicache_size_bytes == 3 << 29


def test_keys_are_never_shown():
    config = load_config({"model_path": "m", "api_key": "sesame", "admin_api_key": "open"})
    assert "sesame" not in str(config.describe())
    assert (config.describe()["api_key"], config.describe()["admin_api_key"]) == ("(set)", "(set)")


def test_the_store_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_config({"model_path": "m"}).storage_dir == tmp_path / "hicache" / "store"


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_every_preset_loads(preset):
    config = load_config({"model_path": "m"}, preset)
    assert config.enable_hierarchical_cache
    assert config.hicache_storage_backend == "lmdb"


def test_help_names_every_flag_in_full():
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    missing = [name for name in ServeConfig.__struct_fields__ if flag_of(name) not in result.output]
    assert missing == []


def test_the_command_line_loads_no_torch():
    loaded = "import sys, engine.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], timeout=60, check=False).returncode == 0


def test_an_unknown_flag_is_refused():
    result = CliRunner().invoke(app, ["serve", "--page-sise", "4"])
    assert result.exit_code == 2
    assert "--page-sise" in result.output
