"""Python environments of their own for clients whose packages would not fit into ours; kept in the user's cache folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from engine.config import cache_home

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["environment_with"]


def environment_with(name: str, *packages: str) -> Path:
    """The Python of an environment that has these packages, made if need be; skips the test if they can't be installed."""
    folder = cache_home() / "test-environments" / name
    python = folder / "bin" / "python"
    made = folder / "made"
    if not made.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"pip could not install {' '.join(packages)}: {reason}")
        made.touch()
    return python
