"""Opening a store's folder: locks, identity, a look at the index from a child process, a fresh one if it is beyond use."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import xxhash

from storage.base import NamespaceInfo
from storage.errors import StoreLocationError, StoreUnavailable
from storage.identity import State, boot_id, load_identity, load_state, save_state
from storage.location import lock_exclusive, lock_shared, prepare_folder, reserve, wait_exclusive

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MIN_CAPACITY_BYTES", "OnDamage", "StoreDamaged", "StoreFolder", "examine_index", "index_bytes"]

OnDamage = Literal["set_aside", "refuse", "keep"]
"""What to do about an index beyond use: replace it, raise StoreDamaged, or not even look."""

MIN_CAPACITY_BYTES = 8 << 20

_log = logging.getLogger(__name__)
_MIB = 1 << 20
_CHECK_TIMEOUT_S = 600.0
_MAX_DEATHS = 3
_INDEX = "index.lmdb"
_NAMESPACES = "NAMESPACES"
_open_lock = threading.Lock()
_open_folders: set[tuple[int, int]] = set()


def index_bytes(capacity_bytes: int) -> int:
    """Size of the index file, reserved on disk when the store is made: 1/128 of the capacity, at least 2 MiB.

    That is enough for pages of 40 KiB and up; a store of smaller pages is full when its index is.
    """
    return max(2 * _MIB, -(-capacity_bytes // 128 // _MIB) * _MIB)


class StoreDamaged(StoreUnavailable):
    """The index can't be used; the message says what is wrong with it."""


def examine_index(path: Path, *, thorough: bool) -> str:
    """Let a child process walk the index, since a damaged B-tree kills who walks it; returns what is wrong, or nothing."""
    size = max(path.stat().st_size, _MIB)
    command = [sys.executable, "-m", "storage.check_structure", str(path), str(size)]
    command += ["--thorough"] if thorough else []
    package_parent = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": package_parent, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "the walk does not end"
    if not done.returncode:
        return ""
    return (done.stdout.strip().splitlines() or [f"the walk died with status {done.returncode}"])[-1]


class StoreFolder:
    """Holds a store's folder for one process: one opening a process, any number of processes a folder.

    sole: no other process had the store open. fresh_index: the index is new while slab files may hold records.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int, on_damage: OnDamage = "set_aside", *, synced_index: bool = False
    ) -> None:
        """Enter the folder. `synced_index`: commits of the index will be durable.

        Raises StoreError; StoreDamaged if the index is damaged and that is to be refused.
        """
        self._on_damage = on_damage
        self._synced = synced_index
        self._suspect = ""
        self._deaths = 0
        prepare_folder(folder)
        self.path = folder.resolve()
        self._claim()
        try:
            self._enter(capacity_bytes)
        except BaseException:
            self._unclaim()
            raise

    @property
    def index_path(self) -> Path:
        return self.path / _INDEX

    def reserve_index(self) -> None:
        """Take the index file's blocks now, so that a full disk can't fail a commit. Raises StoreFull."""
        reserve(self.index_path, self.index_bytes)

    def overhead_bytes(self) -> int:
        """Bytes on disk of all that is not a slab file, the folder included."""
        files = [path for path in self.path.iterdir() if not path.name.startswith("slab-")]
        return sum(_disk_bytes(path) for path in [self.path, *files])

    def remember_namespace(self, info: NamespaceInfo) -> None:
        """Note a namespace outside the index too, for the day the index must be built anew. Raises OSError."""
        body = json.dumps({"digest": info.digest.hex(), "tenant": info.tenant, "labels": dict(info.labels)})
        line = f"{xxhash.xxh3_64_hexdigest(body.encode())} {body}\n".encode()
        fd = os.open(self.path / _NAMESPACES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def remembered_namespaces(self) -> Iterator[NamespaceInfo]:
        """Yield the noted namespaces whose lines are whole."""
        path = self.path / _NAMESPACES
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            digest, _, body = line.partition(" ")
            if digest == xxhash.xxh3_64_hexdigest(body.encode()):
                fields = json.loads(body)
                yield NamespaceInfo(bytes.fromhex(fields["digest"]), fields["labels"], fields["tenant"])

    def set_index_aside(self, reason: str) -> None:
        """Rename a useless index, keep the last such one for a look, and reserve a new one."""
        aside = self.path / f"index.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
        for old in self.path.glob("index.damaged-*"):
            old.unlink()
        self.index_path.rename(aside)
        self._lock_file().unlink(missing_ok=True)
        _log.warning("store index of %s is damaged (%s): set aside as %s", self.path, reason, aside.name)
        self.fresh_index = True

    def suspect(self, reason: str) -> None:
        """Note that LMDB met damage in the index: whoever opens the store alone next builds it anew. Any thread."""
        if not self._suspect:
            _log.error("the index of %s is damaged (%s); it will be built anew at the next start", self.path, reason)
            self._suspect = reason
            save_state(self.path, self._state(clean=False))

    def outlive(self) -> None:
        """Note that this life was not cut short, so that a later death is not held against the index."""
        if self._deaths:
            self._deaths = 0
            save_state(self.path, self._state(clean=False))

    def opened(self) -> None:
        """Note that the index is whole, and let other processes open the store. Until then they wait."""
        if self.fresh_index:
            self._suspect = ""
            save_state(self.path, self._state(clean=False))
        self._let_others_in()

    def close(self, clean: bool) -> None:
        """Leave the folder; `clean` says that all is synced. Idempotent."""
        if self._lock_fd < 0:
            return
        self._let_others_in()
        try:
            if clean and not self._suspect:
                self._leave_clean()
        finally:
            self._unclaim()

    # helpers

    def _leave_clean(self) -> None:
        """Note a clean end if no other process is there, and none is just coming."""
        opening = self._open_file("OPENING")
        try:
            wait_exclusive(opening)
            if lock_exclusive(self._lock_fd):
                save_state(self.path, self._state(clean=True))
        finally:
            os.close(opening)

    def _open_file(self, name: str) -> int:
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _claim(self) -> None:
        stat = self.path.stat()
        self._identity_of_folder = (stat.st_dev, stat.st_ino)
        with _open_lock:
            if self._identity_of_folder in _open_folders:
                raise StoreUnavailable(f"{self.path} is open in this process already")
            _open_folders.add(self._identity_of_folder)
        self._lock_fd = self._opening_fd = -1

    def _unclaim(self) -> None:
        self._let_others_in()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        with _open_lock:
            _open_folders.discard(self._identity_of_folder)

    def _enter(self, capacity_bytes: int) -> None:
        """Take the locks. Who comes first alone looks the index over; who comes later trusts and adapts to the first."""
        try:
            self._opening_fd = self._open_file("OPENING")
            self._lock_fd = self._open_file("LOCK")
        except OSError as error:
            raise StoreLocationError(f"{self.path} can't hold a store: {error.strerror}") from error
        wait_exclusive(self._opening_fd)
        self.sole = lock_exclusive(self._lock_fd)
        self.secret = load_identity(self.path).secret
        self._adopt(load_state(self.path), capacity_bytes)
        lock_shared(self._lock_fd)

    def _let_others_in(self) -> None:
        if self._opening_fd >= 0:
            os.close(self._opening_fd)
            self._opening_fd = -1

    def _adopt(self, left: State | None, capacity_bytes: int) -> None:
        self.fresh_index = not self.index_path.exists()
        self.was_clean = left is not None and left.clean
        self._deaths = 0 if left is None or left.clean else left.deaths + 1
        if not self.fresh_index and self._on_damage != "keep" and (self.sole or self._on_damage == "refuse"):
            self._examine(left)
        if left is not None and not self.sole:
            self.capacity_bytes, self.index_bytes = left.capacity_bytes, left.index_bytes
            if capacity_bytes != left.capacity_bytes:
                _log.warning("%s is in use with a capacity of %d bytes; that stays", self.path, left.capacity_bytes)
            return
        if self.fresh_index:
            self._suspect = "the building of the index was cut short"  # if we die before `opened`
        found = 0 if self.fresh_index else self.index_path.stat().st_size
        self.capacity_bytes = capacity_bytes
        self.index_bytes = max(index_bytes(capacity_bytes), -(-found // _MIB) * _MIB)
        save_state(self.path, self._state(clean=False))

    def _examine(self, left: State | None) -> None:
        if reason := self._recorded_damage(left) or examine_index(self.index_path, thorough=not self.was_clean):
            if self._on_damage == "refuse":
                raise StoreDamaged(reason)
            self.set_index_aside(reason)
            self._deaths = 0

    def _recorded_damage(self, left: State | None) -> str:
        """Say what earlier lives met. A walk does not see LMDB's list of free pages; whoever commits does, or dies of it."""
        if not self.sole or left is None:
            return ""
        if left.suspect:
            return left.suspect
        if not (left.clean or left.synced or left.boot == boot_id()):
            return "the machine went down while it was in use"
        return f"{self._deaths} early deaths in a row" if self._deaths >= _MAX_DEATHS else ""

    def _state(self, *, clean: bool) -> State:
        deaths = 0 if clean else self._deaths
        return State(clean, boot_id(), self._synced, self.capacity_bytes, self.index_bytes, deaths, self._suspect)

    def _lock_file(self) -> Path:
        return self.path / f"{_INDEX}-lock"


def _disk_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
