#!/usr/bin/env bash
# make bench: every benchmarks/*/bench.py, its numbers as JSON under build/bench/. Arguments are names
# of folders: scripts/bench.sh manager.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

begin "make bench"
setup_venv dev
mkdir -p build/bench
[ "$#" -gt 0 ] || set -- $(find benchmarks -mindepth 2 -maxdepth 2 -name bench.py -printf '%P\n' | sort | xargs -r -n 1 dirname)
say "load before: $(cut -d' ' -f1-3 /proc/loadavg) on $(nproc) cores (busy cores spoil the numbers)"
for name in "$@"; do
  stage "benchmarks/$name"
  "$PY" "benchmarks/$name/bench.py" --json "build/bench/$name.json"
done
