"""What a store folder says of itself outside the index: format, secret and how it was last left.

`STORE` and `STORE.copy` hold the same line, so that one damaged file loses no secret (without it no key can be computed, and
all pages are lost). `STATE` is rewritten at open and close.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from storage.errors import StoreFormatError
from storage.location import sync_folder

__all__ = ["FORMAT_VERSION", "Identity", "State", "boot_id", "load_identity", "load_state", "save_state", "write_atomically"]

FORMAT_VERSION = 1

_NAMES = ("STORE", "STORE.copy")
_STATE = "STATE"


@dataclass(frozen=True, slots=True)
class Identity:
    """Fixed when the store is made."""

    format: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class State:
    """How the store was last left.

    clean: the last process to use it closed it. boot: of the machine, see `boot_id`. synced: commits of the index are durable.
    deaths: lives in a row that ended early and unclean.
    suspect: what LMDB said when it met damage; empty if it met none.
    """

    clean: bool
    boot: str
    synced: bool
    capacity_bytes: int
    index_bytes: int
    deaths: int = 0
    suspect: str = ""


def boot_id() -> str:
    """Name this boot of the machine: what was not synced before another boot may be lost."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file so that it is whole, old or new, after any death. Durable on return. Raises OSError."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(scratch, path)
    sync_folder(path.parent)


def load_identity(folder: Path) -> Identity:
    """Read the identity, repair its damaged copy, or make a new store in an empty folder. Raises StoreFormatError."""
    texts = [_read(folder / name) for name in _NAMES]
    good = next((text for text in texts if _unseal(text) is not None), None)
    if good is None:
        if any(texts):
            raise StoreFormatError(f"{folder}: both {' and '.join(_NAMES)} are damaged; the store's secret is lost")
        _refuse_foreign(folder)
        good = _seal({"format": FORMAT_VERSION, "secret": secrets.token_hex(32)})
    for name, text in zip(_NAMES, texts, strict=True):
        if text != good:
            write_atomically(folder / name, good)
    fields = _unseal(good)
    assert fields is not None
    if fields["format"] != FORMAT_VERSION:
        raise StoreFormatError(f"{folder} has format {fields['format']}; this version reads and writes {FORMAT_VERSION}")
    return Identity(FORMAT_VERSION, bytes.fromhex(str(fields["secret"])))


def load_state(folder: Path) -> State | None:
    """Read how the store was left; None for a new store or a damaged file."""
    fields = _unseal(_read(folder / _STATE))
    if fields is None or set(fields) != {field.name for field in dataclasses.fields(State)}:
        return None
    return State(
        clean=bool(fields["clean"]),
        boot=str(fields["boot"]),
        synced=bool(fields["synced"]),
        capacity_bytes=int(fields["capacity_bytes"]),
        index_bytes=int(fields["index_bytes"]),
        deaths=int(fields["deaths"]),
        suspect=str(fields["suspect"]),
    )


def save_state(folder: Path, state: State) -> None:
    """Write how the store is left. Durable on return. Raises OSError."""
    write_atomically(folder / _STATE, _seal(asdict(state)))


def _refuse_foreign(folder: Path) -> None:
    ours = {"LOCK", "OPENING", "lost+found"}
    foreign = sorted({path.name for path in folder.iterdir() if not path.name.startswith(".")} - ours)
    if foreign:
        raise StoreFormatError(f"{folder} holds something else than a store: {', '.join(foreign[:3])}")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _seal(fields: dict[str, object]) -> str:
    body = json.dumps(fields, sort_keys=True)
    return f"{xxhash.xxh3_64_hexdigest(body.encode())} {body}\n"


def _unseal(text: str) -> dict[str, int | str | bool] | None:
    digest, _, body = text.rstrip("\n").partition(" ")
    if not body or digest != xxhash.xxh3_64_hexdigest(body.encode()):
        return None
    fields: dict[str, int | str | bool] = json.loads(body)
    return fields
