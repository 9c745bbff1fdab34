"""The fingerprint changes with all that changes KV, and with nothing else."""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING

import pytest

from engine.fingerprint import config_text, digest_fields, digest_files
from engine.model import load_model
from tests.models import make_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


def fingerprint(folder: Path, page_size: int = 16, kv_dtype: str = "auto", **options: str) -> str:
    model = load_model(str(folder), device="cpu", **options)
    return model.fingerprint(model.geometry(page_size, kv_dtype))


def edit_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_tiny_model("llama", tmp_path / "model")


def test_a_copied_folder_keeps_its_fingerprint(folder, tmp_path):
    assert fingerprint(folder) == fingerprint(shutil.copytree(folder, tmp_path / "elsewhere"))


def test_page_size_kv_dtype_and_dtype_change_it(folder):
    prints = [
        fingerprint(folder),
        fingerprint(folder, page_size=8),
        fingerprint(folder, kv_dtype="bfloat16"),
        fingerprint(folder, dtype="bfloat16"),
    ]
    assert len(set(prints)) == 4


def test_rope_settings_change_it(folder):
    before = fingerprint(folder)
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 123456.0})
    assert fingerprint(folder) != before


def test_one_flipped_bit_in_the_weights_changes_it(folder):
    before = fingerprint(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint(folder) != before


def test_version_and_saved_dtype_in_the_configuration_do_not_change_it(folder):
    before = fingerprint(folder)
    edit_config(folder, transformers_version="0.0.1", dtype="bfloat16")
    assert fingerprint(folder) == before


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    entries, at = {}, 0
    for name, data in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(tensors.values()))


def test_a_big_safetensors_file_is_sampled_in_every_tensor(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {f"layer{i}": bytes([i]) * 50_000 for i in range(20)}
    write_safetensors(path, tensors)
    before = digest_files([path], whole_bytes=0)
    for name in tensors:
        write_safetensors(path, {**tensors, name: b"\xff" * 50_000})
        assert digest_files([path], whole_bytes=0) != before
    write_safetensors(path, tensors)
    assert digest_files([path], whole_bytes=0) == before


def test_other_big_files_are_sampled_from_first_to_last_byte(tmp_path):
    path = tmp_path / "model.gguf"
    content = bytearray(20 << 20)
    path.write_bytes(content)
    before = digest_files([path], whole_bytes=0)
    for at in (0, len(content) - 1):
        changed = bytearray(content)
        changed[at] = 1
        path.write_bytes(changed)
        assert digest_files([path], whole_bytes=0) != before


def test_a_file_smaller_than_a_block_is_read_whole_even_when_sampled(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    before = digest_files([path], whole_bytes=0)
    path.write_bytes(b"abd")
    assert digest_files([path], whole_bytes=0) != before


def test_names_and_the_split_into_files_count_and_order_does_not(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    a.write_bytes(b"12")
    b.write_bytes(b"3")
    c.write_bytes(b"3")
    assert digest_files([a, b]) == digest_files([b, a])
    assert digest_files([a, b]) != digest_files([a, c])
    before = digest_files([a, b])
    a.write_bytes(b"1")
    b.write_bytes(b"23")
    assert digest_files([a, b]) != before


def test_fields_are_framed():
    assert digest_fields({"a": "bc"}) != digest_fields({"ab": "c"})
    assert digest_fields({"a": "b", "c": ""}) != digest_fields({"a": "", "c": "b"})


def test_configuration_text_ignores_order_and_private_keys():
    assert config_text({"a": 1, "b": {"c": 2, "_d": 3}, "_name": "x"}) == config_text({"b": {"c": 2}, "a": 1})
    assert config_text({"a": 1}) != config_text({"a": 2})
