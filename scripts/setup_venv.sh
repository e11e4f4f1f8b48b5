#!/usr/bin/env bash
# Makes .venv: Python packages at the versions of constraints.txt and flexinfer itself, editable, with
# its C++ extension, which rebuilds on import when a C++ file has changed.
#
#   scripts/setup_venv.sh run    what flexinfer needs to run, and the build tools     (make demo)
#   scripts/setup_venv.sh dev    and the tools to test, lint and measure              (make dev, test, lint)
#   scripts/setup_venv.sh eval   and lm-eval, which is heavy                          (make test-slow)
#
# A second call returns at once unless pyproject.toml, constraints.txt, Python or the place changed.
# Sourced by other scripts: `setup_venv dev`. Settings: PYTHON=python3.12, FLEXINFER_VENV=folder.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# PYTHON, or the first usable of the usual names.
find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
    [ -z "${PYTHON:-}" ] || break
  done
  die "${PYTHON:-python3} is missing or older than 3.10 ($(
    "${PYTHON:-python3}" --version 2>&1 | head -n 1)). Install Python >= 3.10, or name one: make PYTHON=python3.12 ..."
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
  { echo "$ROOT" && "$1" -VV && cat pyproject.toml constraints.txt scripts/setup_venv.sh &&
    find python -name "*.py" | sort; } | sha256sum # an editable install knows the files it was made with
}

setup_venv() {
  local level="$1" each python mark package="."
  python="$(find_python)"
  mark="$(fingerprint "$python")"
  export PATH="$VENV/bin:$PATH" # an editable flexinfer calls cmake when it is imported
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

  case "$level" in
    dev) package=".[dev]" ;;
    eval) package=".[dev,eval]" ;;
  esac
  stage "install flexinfer, editable, and what it depends on (torch is large: minutes on a first run)"
  quietly "pip-install-$level" "${pip[@]}" --no-build-isolation \
    -C editable.rebuild=true -C editable.verbose=false -C build-dir=build/editable -e "$package"

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
