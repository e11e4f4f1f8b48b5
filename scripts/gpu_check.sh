#!/usr/bin/env bash
# One command for a machine with a GPU and no network: builds flexinfer against the torch that is there, tests and
# measures it in four calls of under nine minutes, each useful alone, and leaves a summary, tables, plots, JSON and
# logs in one folder, anew after every stage. docs/gpu_check.md says how to use it.
#
#   scripts/gpu_check.sh 1          builds; aliasing, conformance, engine identity, driver calls, overlap, memcheck
#   scripts/gpu_check.sh 2          kernels and a full budget of requests, against pages; begins flash-attn's build
#   scripts/gpu_check.sh 3          flash-attn's kernels, and the engine against transformers
#   scripts/gpu_check.sh 4          every family of models, and what requests may ask for
#   scripts/gpu_check.sh            the first of them that has not been made
#   scripts/gpu_check.sh --only A,B | --skip A,B   chooses stages, of any call;  --list  prints them
#   scripts/gpu_check.sh --seconds N        time for everything (default 540)
#   scripts/gpu_check.sh --budget NAME=N    another budget for one stage, e.g. end_to_end=300
#   scripts/gpu_check.sh --dry-run-on-cpu   every stage on the CPU with tiny sizes, to prove this script
#   scripts/gpu_check.sh --pack             (with a network) fetches what the GPU machine may miss
#
# Exit code: 0 only if every chosen stage passed. What was skipped is listed with the reason; the last line says what
# to do next.
# Settings: PYTHON=python3, GPU_CHECK_DIR=build/gpu_check, GPU_CHECK_CARRY=build/gpu_carry, OUT=folder of the results,
# FLASH_FULL=1 (all of flash-attn, not only what is measured), JOBS.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
task="gpu_check"
cd "$ROOT"

WORK="$(realpath -m "${GPU_CHECK_DIR:-build/gpu_check}")"
CARRY="$(realpath -m "${GPU_CHECK_CARRY:-build/gpu_carry}")"
BASE="${PYTHON:-python3}"
VENV="$WORK/venv"
PY="$VENV/bin/python"
JOBS="${JOBS:-$(nproc)}"
CALLS="$WORK/calls"
FLASH="$WORK/flash"
DEVICE=cuda

# Stage, calls that have it, budget in seconds, what it does. A stage gets its budget or what is left of the whole,
# whichever is less; the report has its own reserve. Cold machines are slow at first: the first `import torch` took
# over 20 s there.
STAGES="\
environment   1234  50  the machine, its driver and packages; fails without a GPU
build         1234  75  flexinfer, built here, in a virtual environment over the packages that are there
aliasing      1     65  tests: one chunk behind many addresses, memory under running kernels, shortage
ctest         1     75  the C++ tests, and the driver conformance suite on the real driver
engine        1     85  tests: the engine says what transformers says, with graphs and without
api_latency   1     25  benchmark: the driver's memory calls by chunk size
gpu_overlap   1     50  benchmark: step time with mapping ahead of the kernels and without
sanitizer     1     90  a short program over the manager under compute-sanitizer
flash-start   23    10  starts flash-attn's build in the background, where its source was carried
kernel_tests  2     50  tests: every attention kernel against attention written out
full_budget   2    220  benchmark: 5,000 requests over 15 shared prompts in a full budget, against pages
kernels       2    115  benchmark: attention on vTensors, plain tensors and pages
flash-wait    3    160  waits for flash-attn's build and installs it
flash_tests   3     40  tests: flash-attn's kernels and the engine that uses them
flash_kernels 3     45  benchmark: flash-attn on vTensors, plain tensors and pages
flash_budget  3     60  benchmark: 1,000 of these requests, flash-attn on ranges and on pages
end_to_end    3     85  benchmark: generation against transformers' continuous batching
families      4     150 tests: every family of models says what transformers says
features      4     90  tests: sampling, speculation, adapters, structure, preemption, sleep"
REPORT_RESERVE=15

stages_of() { awk -v call="$1" 'index($2, call) {print $1}' <<<"$STAGES" | paste -sd " "; }

call=""
chosen=""
skip=""
total=540
pack=no
budgets=""

usage() { sed -n '2,/^source/p' "${BASH_SOURCE[0]}" | sed '$d; s/^# \{0,1\}//'; }

while [ "$#" -gt 0 ]; do
  case "$1" in
    1 | 2 | 3 | 4) call="$1" ;;
    --only) chosen="environment build $(tr , "\n" <<<"$2" | sed -E "/^(environment|build)?$/d" | paste -sd " ")"; shift ;;
    --skip) skip="${2//,/ }"; shift ;;
    --seconds) total="$2"; shift ;;
    --out) OUT="$2"; shift ;;
    --budget) budgets+="${2%%=*} ${2##*=}"$'\n'; shift ;;
    --dry-run-on-cpu) DEVICE=cpu ;;
    --pack) pack=yes ;;
    --list) echo "$STAGES"; exit 0 ;;
    --help | -h) usage; exit 0 ;;
    *) die "unknown option $1; scripts/gpu_check.sh --help lists them" ;;
  esac
  shift
done
known="$(awk '{print $1}' <<<"$STAGES")"
for name in $chosen $skip; do
  grep -qx -- "$name" <<<"$known" || die "no stage $name; there are: ${known//$'\n'/ }"
done

# ------------------------------------------------------------------------------------ before, with a network

# Pure or cp312 wheels that the GPU machine may miss; torch, triton and transformers are there or nothing works.
PACKED="sortedcontainers typer rich shellingham markdown-it-py mdurl pygments tqdm jinja2 markupsafe psutil
httpx httpcore h11 anyio idna certifi pytest pytest-timeout pluggy iniconfig hypothesis scikit-build-core pathspec nanobind packaging einops
typing-extensions fastapi starlette pydantic pydantic-core typing-inspection annotated-types annotated-doc uvicorn click
httptools uvloop prometheus-client pyyaml llguidance opentelemetry-api"

pack_carry() {
  mkdir -p "$CARRY/wheels" "$LOGS"
  local platform
  local -a pip=("$BASE" -m pip download --disable-pip-version-check --no-deps --dest "$CARRY/wheels")
  local -a target=(--only-binary=:all: --python-version 3.12 --implementation cp)
  for platform in 2_39 2_35 2_34 2_31 2_28 2_27 2_17; do target+=(--platform "manylinux_${platform}_x86_64"); done
  target+=(--platform manylinux2014_x86_64 --platform any)
  say "wheels for Python 3.12"
  # shellcheck disable=SC2086
  quietly gpu-pack-wheels "${pip[@]}" "${target[@]}" $PACKED
  say "flash-attn's source"
  if ! ls "$CARRY"/flash_attn-*.tar.gz >/dev/null 2>&1; then
    local url
    url="$(curl -fsSL https://pypi.org/simple/flash-attn/ | grep -oE 'https://[^"#]+/flash_attn-2\.[0-9.]+(post[0-9]+)?\.tar\.gz' | tail -n 1)"
    curl -fsSL -o "$CARRY/$(basename "$url")" "$url"
  fi
  say "GoogleTest's source"
  if [ ! -d "$CARRY/googletest" ]; then
    [ -d /usr/src/googletest ] || need_packages "GoogleTest's source is not here" googletest
    cp -rL /usr/src/googletest "$CARRY/googletest"
  fi
  git rev-parse --short HEAD >"$CARRY/commit"
  local mib
  mib="$(($(du -sm "$CARRY" | cut -f1) + $(git ls-files -z | xargs -0 du -cm | tail -n 1 | cut -f1)))"
  say "packed ${CARRY#"$ROOT"/}: $mib MiB with the tree; carry it to the GPU machine"
  [ "$mib" -lt 64 ] || die "that is more than the 64 MiB that may travel"
}

if [ "$pack" = yes ]; then
  pack_carry
  exit 0
fi

source "$ROOT/scripts/gpu_stages.sh"

# ------------------------------------------------------------------------------------ running them

record() { # stage, status, seconds, budget, reason
  printf '%s\t%s\t%s\t%s\t%s\n' "$@" >>"$RUN/stages.tsv"
  printf '[gpu_check] %-13s %-8s %4s s of %s%s\n' "$1" "$2" "$3" "$4" "${5:+  ($5)}"
}

# Runs one stage in a process group of its own, so that a time-out ends all of it.
run_stage() {
  local name="$1" budget left start=$SECONDS status=0 log reason=""
  budget="$(awk -v name="$name" '$1 == name {print $3}' <<<"$STAGES")"
  budget="$(awk -v name="$name" -v budget="$budget" '$1 == name {budget = $2} END {print budget}' <<<"$budgets")"
  # The machine that proves the script may be slow; only its logic counts there.
  [ "$DEVICE" = cuda ] || budget=$((budget * 6))
  left=$((total - SECONDS - REPORT_RESERVE))
  if [ "$left" -lt 10 ]; then
    record "$name" skipped 0 "$budget" "no time left: $SECONDS of $total s are used"
    failures=$((failures + 1))
    return
  fi
  [ "$budget" -le "$left" ] || budget=$left
  log="$LOGS/$name.log"
  rm -f "$RUN/reason"
  say "==> $name (at most $budget s)"
  timeout --kill-after=10 "$budget" bash -c 'set -euo pipefail; source "$1"; "stage_$2" "$3"' \
    stage "$RUN/functions.sh" "$name" "$budget" >"$log" 2>&1 </dev/null || status=$?
  case "$status" in
    0) record "$name" passed $((SECONDS - start)) "$budget" "" ;;
    77)
      reason="$(cat "$RUN/reason" 2>/dev/null || echo "no reason given")"
      record "$name" skipped $((SECONDS - start)) "$budget" "$reason"
      ;;
    124 | 137)
      record "$name" timeout $((SECONDS - start)) "$budget" "ended after its $budget s"
      failures=$((failures + 1))
      tail -n 15 "$log"
      ;;
    *)
      record "$name" failed $((SECONDS - start)) "$budget" "exit code $status; see logs/$name.log"
      failures=$((failures + 1))
      tail -n 25 "$log"
      ;;
  esac
}

# The report over all calls so far: after each stage without its pictures, so that an end by force loses nothing.
report() {
  [ "$DEVICE" = cpu ] && note "DRY RUN ON THE CPU: tiny sizes, no number here says anything about a GPU"
  if [ -f "$FLASH/pid" ] && [ ! -f "$FLASH/done" ] && [ ! -f "$FLASH/failed" ]; then
    note "flash-attn was being built (nice 19) while this ran: host-side times may have suffered"
  fi
  local python="$PY"
  [ -x "$python" ] || python="$BASE"
  "$python" scripts/gpu_report.py "$CALLS" "$RESULTS" "$@" || say "the report could not be written"
}

next_step() {
  local bad other
  bad="$(awk -F '\t' '$2 == "failed" || $2 == "timeout" {print $1}' "$RUN/stages.tsv" | paste -sd ,)"
  for other in 1 2 3 4; do [ -e "$CALLS/$other/ended" ] || break; done
  if [ -n "$bad" ]; then
    echo "next: look at $bad in $RESULTS/summary.md, repair, then scripts/gpu_check.sh --only $bad"
  elif [ ! -e "$CALLS/$other/ended" ]; then
    echo "next: scripts/gpu_check.sh $other ($(stages_of "$other"))"
  else
    echo "next: nothing, all four calls were made; keep $RESULTS"
  fi
}

if [ -z "$call" ] && [ -z "$chosen" ]; then
  for call in 1 2 3 4; do [ -e "$CALLS/$call/ended" ] || break; done
fi
[ -n "$chosen" ] || chosen="$(stages_of "$call")"
RUN="$CALLS/${call:-some}"
LOGS="$RUN/logs"
# What an earlier call of this number measured stays, beside the new one.
if [ -d "$RUN" ]; then mv "$RUN" "$RUN.until-$(date +%H%M%S)"; fi
mkdir -p "$RUN" "$LOGS"
# Read-only sources would be rebuilt in place otherwise; everything is written under $WORK.
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_MODULE_LOADING=LAZY
export HYPOTHESIS_STORAGE_DIRECTORY="$WORK/hypothesis" TRITON_CACHE_DIR="$WORK/triton"
[ "$DEVICE" = cuda ] || export TRITON_INTERPRET=1   # the Triton kernel's body runs there too
RESULTS="${OUT:-$WORK/results}"
mkdir -p "$RESULTS"
git rev-parse --short HEAD >"$RUN/commit" 2>/dev/null || cat "$CARRY/commit" >"$RUN/commit" 2>/dev/null || echo unknown >"$RUN/commit"
GPU_CHECK_COMMIT="$(cat "$RUN/commit")"
export GPU_CHECK_COMMIT
{
  declare -p ROOT WORK CARRY BASE VENV PY JOBS LOGS RUN FLASH DEVICE
  declare -f
} >"$RUN/functions.sh"
: >"$RUN/notes.txt"
: >"$RUN/stages.tsv"
printf 'scripts/gpu_check.sh %s, %s, stages: %s\n' "$call" "$DEVICE" "$chosen" >"$RUN/command"
failures=0
finished=no
# On the way out, whatever the reason, the report is written once more, now with pictures.
trap '[ "$finished" = yes ] || report --plots >"$LOGS/report.log" 2>&1 || true' EXIT
for name in $chosen; do
  if grep -qw -- "$name" <<<"$skip"; then
    record "$name" skipped 0 0 "by --skip"
    continue
  fi
  run_stage "$name"
  adopt_flash
  if [ "$failures" -gt 0 ] && { [ "$name" = environment ] || [ "$name" = build ]; }; then
    for rest in ${chosen#*"$name"}; do record "$rest" skipped 0 0 "stage $name failed"; done
    break
  fi
  report >"$LOGS/report.log" 2>&1
done
date -u >"$RUN/ended"
next_step >"$RUN/next"
report --plots
finished=yes
say "$failures stages failed; $SECONDS s in all; results in $RESULTS"
say "$(cat "$RUN/next")"
[ "$failures" -eq 0 ]
