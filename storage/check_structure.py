"""Walks an index so that the caller need not die of it: `python -m storage.check_structure INDEX MAP_BYTES [--thorough]`.

Exit status 0 means usable; anything else, death by signal included, means not. Prints what it found. Without `--thorough` a
large index is only sampled at its totals, since its last user closed it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from storage.lmdb_audit import audit_index
from storage.lmdb_index import Index

__all__ = ["main"]

_LARGE_PAGES = 100_000


def main(arguments: list[str]) -> int:
    """Check one index file; see the module."""
    path, map_bytes, *options = arguments
    try:
        index = Index(Path(path), int(map_bytes), durable_commits=False, readonly=True)
        with index.read() as txn:
            if "--thorough" not in options and index.totals(txn).pages > _LARGE_PAGES:
                return 0
            finding = next(audit_index(index, txn), None)
    except Exception as error:  # a decoder fed with garbage may raise anything
        finding = f"{type(error).__name__}: {error}"
    if finding is not None:
        sys.stdout.write(finding + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
