#!/usr/bin/env bash
# make families: tries all causal architectures of transformers on tiny models, and writes the table in docs/families.md.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

begin "make families"
setup_venv dev
"$PY" scripts/families.py "$@"
