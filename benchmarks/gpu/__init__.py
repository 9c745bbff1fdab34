"""Everything that only an NVIDIA GPU can show, in one run: `make test-gpu`, or `python -m benchmarks.gpu --out FOLDER`."""
