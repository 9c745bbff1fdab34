"""How a part of the run reports: one line of JSON a figure on its output, among whatever else it prints."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

__all__ = ["Figure", "emit", "parse"]

MARK = "figure: "


class Figure(NamedTuple):
    """One measured value. limit: what it should not exceed (or, if `at_least`, fall below); None: nothing was promised."""

    part: str
    what: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False
    raw: dict[str, Any] = {}  # noqa: RUF012 - never changed

    @property
    def verdict(self) -> str:
        """Whether it keeps its limit."""
        if self.limit is None:
            return ""
        kept = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "ok" if kept else "MISSED"

    @property
    def promise(self) -> str:
        """The limit, as text."""
        return "" if self.limit is None else f"{'>=' if self.at_least else '<='} {self.limit:g}"


def emit(figure: Figure) -> None:
    """Report a figure to whoever started this part."""
    print(MARK + json.dumps(figure._asdict()), flush=True)


def parse(output: str) -> list[Figure]:
    """The figures of a part's output."""
    return [Figure(**json.loads(line.removeprefix(MARK))) for line in output.splitlines() if line.startswith(MARK)]
