"""Imported before any test: loads the engine package first, which settles how torch's threads wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import engine as _engine  # noqa: F401
from tests.engine_driver import Driver
from tests.models import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that loads in no time."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture
def engine(model: Path) -> Iterator[Callable[..., Driver]]:
    """Start engines in this process: `engine(max_total_tokens=256)`; all are closed at the end."""
    started: list[Driver] = []

    def start(**flags: Any) -> Driver:
        started.append(Driver(model, **flags))
        return started[-1]

    yield start
    for driver in started:
        driver.close()
