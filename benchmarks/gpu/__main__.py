"""Runs the parts one after the other, each in a process of its own, and prints one table; the raw figures go into a folder.

Needs only the standard library itself, so that it can also say what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.figures import Figure, parse
from benchmarks.gpu.wheels import unpack

ROOT = Path(__file__).parents[2]
MINUTES = 7.8


class Part(NamedTuple):
    """A process to run. seconds: how long it may take at most; the run as a whole has an end, too."""

    name: str
    command: list[str]
    seconds: float


class Ended(NamedTuple):
    """How a part ended. state: ok, failed, cut off or left out."""

    name: str
    state: str
    seconds: float
    figures: list[Figure]
    output: str


def parts(device: str) -> list[Part]:
    """What is run, in this order."""

    def module(name: str, *args: str) -> list[str]:
        return [sys.executable, "-m", f"benchmarks.gpu.{name}", "--device", device, *args]

    tests = ["tests/conformance/test_attention.py", "tests/conformance/test_copiers.py", "tests/gpu"]
    tests += ["tests/conformance/test_flashinfer_signatures.py"]
    # -W default: the packages are the machine's, not those that this project is tested with, and may warn of anything.
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-rfEs", "-p", "no:cacheprovider", *tests]
    return [
        Part("compile", module("kernels"), 240),
        Part("batteries", pytest, 180),
        Part("parity", module("parity"), 60),
        Part("copies", module("copies"), 90),
        Part("attention", module("attention"), 60),
        Part("decode", module("decode"), 90),
        Part("multiturn", module("multiturn"), 120),
    ]


def main() -> int:
    """Run everything; returns 1 if a part failed or a figure missed its limit."""
    options = _options()
    begun_s = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hicache-wheels-") as site:
        if options.bundle is not None:
            unpack(options.bundle, Path(site))
        ended = []
        for part in parts(options.device):
            if options.only and part.name not in options.only:
                continue
            left_s = options.minutes * 60 - (time.monotonic() - begun_s)
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            ended.append(_run(part, left_s))
            (options.out / f"{part.name}.log").write_text(ended[-1].output)
    seconds = time.monotonic() - begun_s
    table = _table(ended, seconds)
    if options.device == "cpu":
        table += "\na rehearsal on a CPU, with tiny models: it shows that everything runs, and the figures mean nothing"
    print(table)
    (options.out / "table.txt").write_text(table + "\n")
    (options.out / "figures.json").write_text(json.dumps(_raw(ended, seconds), indent=1) + "\n")
    missed = [figure for part in ended for figure in part.figures if figure.verdict == "MISSED"]
    return 1 if missed or any(part.state != "ok" for part in ended) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder for the table, raw figures and logs")
    parser.add_argument("--bundle", type=Path, help="folder of wheels for what this Python lacks (scripts/gpu_bundle.sh)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal with tiny models")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="when the run ends, whatever is left")
    parser.add_argument("--only", nargs="*", help="names of parts to run")
    return parser.parse_args()


def _run(part: Part, left_s: float) -> Ended:
    if left_s < 5:
        return Ended(part.name, "left out", 0.0, [], "")
    begun_s = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # so that its compilers end with it
        )
        try:
            code: int | None = process.wait(min(part.seconds, left_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        log.seek(0)
        output = log.read()
    seconds = time.monotonic() - begun_s
    figures = parse(output) or _tests(part.name, output)
    state = "cut off" if code is None else "ok" if code == 0 else "failed"
    return Ended(part.name, state, seconds, figures, output)


def _tests(name: str, output: str) -> list[Figure]:
    """What a pytest run says of itself at its end."""
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", output)}
    if not counts:
        return []
    bad = sum(count for what, count in counts.items() if what in ("failed", "error", "errors"))
    return [
        Figure(name, "tests passed", counts.get("passed", 0), "", 1, at_least=True),
        Figure(name, "tests failed", bad, "", 0),
        Figure(name, "tests skipped", counts.get("skipped", 0), ""),
    ]


def _table(ended: list[Ended], seconds: float) -> str:
    lines = [f"{'part':<11} {'what':<58} {'value':>12} {'unit':<9} {'limit':>9}  verdict"]
    for part in ended:
        for figure in part.figures:
            value = f"{figure.value:,.4g}" if abs(figure.value) < 1000 else f"{figure.value:,.0f}"
            lines.append(
                f"{part.name:<11} {figure.what:<58} {value:>12} {figure.unit:<9} {figure.promise:>9}  {figure.verdict}".rstrip()
            )
        if part.state != "ok":
            last = [line for line in part.output.splitlines() if line.strip()][-1:]
            lines.append(f"{part.name:<11} {part.state} after {part.seconds:.0f} s: {' '.join(last)[:150]}")
    took = ", ".join(f"{part.name} {part.seconds:.0f} s" for part in ended)
    return "\n".join([*lines, f"{seconds:.0f} s in all: {took}"])


def _raw(ended: list[Ended], seconds: float) -> dict[str, object]:
    parts = [{**part._asdict(), "figures": [figure._asdict() for figure in part.figures]} for part in ended]
    return {"machine": platform.platform(), "python": platform.python_version(), "seconds": seconds, "parts": parts}


if __name__ == "__main__":
    sys.exit(main())
