"""Makes packages that this Python lacks importable from a folder of wheels, without a network and without changing it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["lacking", "unpack"]


def lacking(bundle: Path) -> list[Path]:
    """The wheels of packages that are not installed."""
    return [wheel for wheel in sorted(bundle.glob("*.whl")) if not _is_installed(wheel.name.split("-")[0])]


def unpack(bundle: Path, site: Path) -> None:
    """Install what is lacking into `site`, and let the processes started from now on find it. Raises RuntimeError."""
    wheels = lacking(bundle)
    if wheels:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        done = subprocess.run([*pip, *map(str, wheels)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the wheels of {bundle} can't be installed: {done.stderr.strip()[-500:]}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(re.sub(r"[-_.]+", "-", name))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
