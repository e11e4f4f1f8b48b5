#!/usr/bin/env bash
# make demo: set up .venv and run `flexinfer demo`. Arguments go to it: make demo ARGS='--plot mem.png'.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

begin "make demo"
setup_venv run
stage "flexinfer demo${*:+ $*}"
"$VENV/bin/flexinfer" demo "$@"
