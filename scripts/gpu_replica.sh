#!/usr/bin/env bash
# Builds a replica of a lent GPU machine, without its GPU, and proves scripts/gpu_check.sh in it: Python 3.12, PyPI's
# CUDA build of torch 2.11, transformers 5.17 and what else scripts/gpu_replica.txt lists, and no network.
#
#   scripts/gpu_replica.sh                   all four calls of gpu_check.sh, --dry-run-on-cpu
#   scripts/gpu_replica.sh 1 --only build    arguments for gpu_check.sh instead
#
# The first run fetches 3 GB and takes 7 GB of disk. Settings: PYTHON=python3.12, REPLICA=build/gpu_replica.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
begin "gpu_replica"

REPLICA="$(realpath -m "${REPLICA:-build/gpu_replica}")"
VENV="$REPLICA/venv"

make_replica() {
  local python="${PYTHON:-python3.12}" mark
  mark="$(sha256sum <scripts/gpu_replica.txt)"
  if [ "$(cat "$REPLICA/ready" 2>/dev/null)" = "$mark" ]; then return; fi
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
    die "$python is not Python 3.12, which the lent machines have: name one, PYTHON=/path/to/python3.12"
  stage "install torch for CUDA and the rest of scripts/gpu_replica.txt in ${VENV#"$ROOT"/}"
  "$python" -m venv "$VENV"
  quietly gpu-replica "$VENV/bin/python" -m pip install --disable-pip-version-check -r scripts/gpu_replica.txt
  echo "$mark" >"$REPLICA/ready"
}

# Without a network, where this user may have a namespace of its own; pip and Hugging Face are told in any case.
offline() {
  local wrap=()
  if unshare -rn true 2>/dev/null; then wrap=(unshare -rn); else say "the network stays reachable: no unshare"; fi
  PYTHON="$VENV/bin/python" GPU_CHECK_DIR="$REPLICA/check" GPU_CHECK_CARRY="$REPLICA/carry" PIP_NO_INDEX=1 \
    HF_HUB_OFFLINE=1 PATH="$VENV/bin:$PATH" "${wrap[@]}" scripts/gpu_check.sh "$@" --dry-run-on-cpu --seconds 5400
}

# What was built here spares the GPU machine the minute: scripts/gpu_check.sh takes it where the sources are the same.
keep_wheel() {
  ls "$REPLICA"/check/dist/flexinfer-*.whl >/dev/null 2>&1 || return 0
  mkdir -p build/gpu_carry
  rm -f build/gpu_carry/flexinfer-*.whl
  cp "$REPLICA"/check/dist/flexinfer-*.whl build/gpu_carry
  cp "$REPLICA/check/built" build/gpu_carry/sources
}

make_replica
if [ "$#" -gt 0 ]; then
  stage "gpu_check.sh $* --dry-run-on-cpu"
  offline "$@"
else
  for call in 1 2 3 4; do
    stage "gpu_check.sh $call --dry-run-on-cpu"
    offline "$call"
  done
fi
keep_wheel
