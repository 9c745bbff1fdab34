"""Where a store may live: a local, writable folder on a file system that can punch holes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path

from storage.errors import StoreFull, StoreLocationError

__all__ = [
    "file_system_type",
    "lock_exclusive",
    "lock_shared",
    "prepare_folder",
    "punch_hole",
    "reserve",
    "sync_folder",
    "wait_exclusive",
]

_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "glusterfs",
    "afs",
    "beegfs",
    "ocfs2",
    "gfs2",
}
_NETWORK_FUSE = ("fuse.sshfs", "fuse.s3fs", "fuse.glusterfs", "fuse.gcsfuse", "fuse.ceph", "fuse.rclone", "fuse.juicefs")
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def file_system_type(path: Path, mountinfo: str) -> str:
    """Name the type of the file system that holds `path` (absolute, no links), from the text of /proc/self/mountinfo."""
    best, found = -1, "unknown"
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split(" ")[4].replace("\\040", " ")
        inside = mount == "/" or path == Path(mount) or str(path).startswith(mount + "/")
        if inside and len(mount) >= best:
            best, found = len(mount), right.split(" ")[0]
    return found


def prepare_folder(folder: Path) -> None:
    """Create the folder if need be, and refuse it with StoreLocationError if no store can live there."""
    if folder.exists() and not folder.is_dir():
        raise StoreLocationError(f"{folder} is not a folder")
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_network(folder)
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreLocationError(f"{folder} can't hold a store: {error.strerror}") from error
    try:
        os.ftruncate(fd, 4096)
        punch_hole(fd, 0, 4096)
    except OSError as error:
        raise StoreLocationError(f"the file system of {folder} can't punch holes: {error.strerror}") from error
    finally:
        os.close(fd)
        os.unlink(probe)


def _refuse_network(folder: Path) -> None:
    kind = file_system_type(folder.resolve(), Path("/proc/self/mountinfo").read_text())
    if kind in _NETWORK or kind.startswith(_NETWORK_FUSE):
        raise StoreLocationError(f"{folder} is on a network file system ({kind}); a store needs a local one")


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give the blocks of `[offset, offset + size)` back to the file system; they read as zeros. Raises OSError."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reserve(path: Path, size: int) -> None:
    """Make sure that `path` owns its first `size` bytes on disk. Raises StoreFull or StoreLocationError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"no room for the {size} bytes of {path.name}") from error
        raise StoreLocationError(f"can't reserve {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def lock_exclusive(fd: int) -> bool:
    """Try to become the only holder of the lock file; never waits."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_shared(fd: int) -> None:
    """Hold the lock file beside others; waits for an exclusive holder."""
    fcntl.flock(fd, fcntl.LOCK_SH)


def wait_exclusive(fd: int) -> None:
    """Become the only holder of the lock file; waits for others. Closing `fd` releases it."""
    fcntl.flock(fd, fcntl.LOCK_EX)
