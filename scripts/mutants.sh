#!/usr/bin/env bash
# make mutants: see scripts/mutants.py, which needs the development environment.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

begin "make mutants"
setup_venv dev
export PATH="$VENV/bin:$PATH"
stage "Mutants: each must fail its tests"
"$PY" scripts/mutants.py "$@"
