#!/usr/bin/env bash
# Collects into a folder the wheels that `make test-gpu BUNDLE=FOLDER` needs on a machine without a network, whose Python has
# torch, triton and transformers: scripts/gpu_bundle.sh FOLDER [PYTHON_VERSION, 3.12]. Wheels of packages that such a Python has
# already are not unpacked there. Versions are constraints.txt's; FLASHINFER=0.7.4 chooses another of FlashInfer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly folder=${1:?usage: scripts/gpu_bundle.sh FOLDER [PYTHON_VERSION]} version=${2:-3.12}
readonly python=${PYTHON:-.venv/bin/python} flashinfer=${FLASHINFER:-0.5.3}

# What hicache and its tests import and such an image may lack. What FlashInfer needs but attention does not is left out: its
# DSLs alone would take the bundle over its size.
readonly packages=(
  lmdb xxhash msgspec fastapi starlette annotated-doc anyio idna sniffio uvicorn h11 click pydantic pydantic_core
  annotated-types typing-inspection typing_extensions pyzmq prometheus_client typer shellingham psutil httpx httpcore certifi
  gguf llguidance PyYAML tqdm pytest iniconfig pluggy packaging pytest-timeout pytest-asyncio hypothesis sortedcontainers
)
readonly unpinned=("flashinfer-python==$flashinfer" apache-tvm-ffi einops ninja nvidia-ml-py tabulate)

platforms=()
for glibc in 2_39 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

mkdir -p "$folder"
wanted=("${unpinned[@]}")
for package in "${packages[@]}"; do
  wanted+=("$(grep -iE "^${package//[-_]/[-_]}==" constraints.txt || echo "$package")")
done
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
  --implementation cp --python-version "$version" "${platforms[@]}" -d "$folder" "${wanted[@]}"
printf '%s: %s wheels, %s MiB\n' "$folder" "$(find "$folder" -name '*.whl' | wc -l)" "$(du -sm "$folder" | cut -f 1)"
