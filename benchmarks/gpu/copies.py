"""Pages between device and host memory, neighbours and scattered, by page size, beside the most that the link moves."""

from __future__ import annotations

from benchmarks.gpu.common import device_option
from benchmarks.gpu.figures import Figure, emit
from engine.cli.copy_speed import measure


def main() -> None:
    """Measure as `hicache bench copy` does."""
    device = device_option()
    moved_mib, runs = (256, 5) if device.type == "cuda" else (16, 2)
    for figure in measure(device.type, "auto", moved_mib, runs):
        what = f"{figure.op} {figure.page_kib} KiB {figure.pattern} ({figure.share:.0%} of one large copy)"
        emit(Figure("copies", what, figure.gib_s, "GiB/s", raw=figure._asdict()))


if __name__ == "__main__":
    main()
