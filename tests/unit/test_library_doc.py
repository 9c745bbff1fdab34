"""The library's page shows code that runs, and what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hicache

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def test_code_on_the_page_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "library_page"})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("name", hicache.__all__)
def test_every_export_is_there(name: str) -> None:
    assert getattr(hicache, name).__name__ == name


def test_what_is_not_exported_is_missing() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(hicache, "nothing")  # noqa: B009


def test_vocabulary_loads_without_torch() -> None:
    code = (
        "import sys, hicache; hicache.CacheConfig, hicache.Namespace, hicache.PageGeometry; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PAGE.parents[1])
