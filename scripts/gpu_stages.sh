# The stages of scripts/gpu_check.sh, a function stage_NAME each; sourced by it, never run. A stage gets its budget in
# seconds, runs in a process group of its own, and leaves what it found in $RUN.

note() { grep -qxF -- "$*" "$RUN/notes.txt" 2>/dev/null || printf '%s\n' "$*" >>"$RUN/notes.txt"; }   # for the summary

# Ends a stage as skipped, with the reason.
skipped() {
  echo "$*" >"$RUN/reason"
  exit 77
}

base_site_packages() {
  "$BASE" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith(("-packages",))))'
}

# A virtual environment that sees the packages of $BASE, which may be in a virtual environment itself.
make_venv() {
  if [ ! -x "$PY" ]; then
    "$BASE" -m venv --without-pip "$VENV"
    local site
    site="$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    base_site_packages >"$site/base.pth"
  fi
}

stage_environment() {
  make_venv
  {
    date -u
    uname -a
    nproc
    free -g || true
    "$BASE" -VV
    nvcc --version || true
    "$PY" -m pip list 2>/dev/null || true
  } >"$LOGS/environment.txt" 2>&1
  if [ "$DEVICE" = cuda ]; then
    nvidia-smi | tee -a "$LOGS/environment.txt"
    "$PY" -c '
import torch
print("torch", torch.__version__, "CUDA", torch.version.cuda)
assert torch.cuda.is_available(), "torch finds no CUDA device"
print(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))'
  fi
  "$PY" scripts/gpu_packages.py "$CARRY/wheels" "$RUN/notes.txt"
}

is_built() { [ "$(cat "$WORK/built" 2>/dev/null)" = "$(source_hash)" ] && (cd / && "$PY" -c 'import flexinfer'); }

# Of everything that a build reads: a copy of the tree may have no git.
source_hash() {
  find cpp python CMakeLists.txt pyproject.toml -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
}

# The wheel that scripts/gpu_replica.sh has built of these sources, if it travelled.
carried_build() {
  [ "$(cat "$CARRY/sources" 2>/dev/null)" = "$(source_hash)" ] && ls "$CARRY"/flexinfer-*.whl
}

stage_build() {
  make_venv
  if is_built; then skipped "these sources were built by an earlier call"; fi
  local wheel
  if ! wheel="$(carried_build)"; then
    rm -rf "$WORK/ext/CMakeCache.txt" "$WORK/dist"
    PATH="$(dirname "$(command -v "$BASE")"):$PATH" "$PY" -m pip wheel --no-index --no-deps --no-build-isolation \
      --disable-pip-version-check -C build-dir="$WORK/ext" --wheel-dir "$WORK/dist" . || return 1
    wheel="$(ls "$WORK"/dist/flexinfer-*.whl)"
  fi
  "$PY" -m pip install --no-index --no-deps --force-reinstall --disable-pip-version-check "$wheel" || return 1
  # The tests must see what was just built, nothing else that is called flexinfer.
  (cd / && "$PY" -c '
import pathlib, sys, flexinfer
place = pathlib.Path(flexinfer.__file__)
assert place.is_relative_to(sys.argv[1]), f"flexinfer comes from {place}"
from flexinfer.vtensor import VTensorManager, KVSpec
with VTensorManager(KVSpec(2, 8, 128, "bfloat16"), sys.argv[2], memory_budget="64MiB") as manager:
    manager.create().extend(100)
    manager.check_integrity()
print("flexinfer", flexinfer.__version__, "works on", sys.argv[2], "from", place)' "$VENV" "$DEVICE")
  source_hash >"$WORK/built"
}

flash_sdist() { ls "$CARRY"/flash_attn-*.tar.gz 2>/dev/null | tail -n 1; }

has_flash() { "$PY" -c 'import flash_attn' 2>/dev/null; }

stage_flash-start() {
  has_flash && skipped "flash-attn is installed"
  if ls "$CARRY"/flash_attn-*.whl >/dev/null 2>&1; then
    install_flash "$CARRY"
    return
  fi
  [ -n "$(flash_sdist)" ] || skipped "flash-attn's source was not carried (scripts/gpu_check.sh --pack fetches it)"
  local full=()
  [ "${FLASH_FULL:-0}" = 0 ] || full=(--full)
  if [ "$DEVICE" = cpu ]; then
    "$PY" scripts/flash_attn_build.py "$(flash_sdist)" "$FLASH" --prepare-only
    return
  fi
  command -v nvcc >/dev/null || skipped "nvcc is not on the PATH"
  if [ -f "$FLASH/pid" ] && kill -0 "$(cat "$FLASH/pid")" 2>/dev/null; then
    echo "already being built"
    return
  fi
  [ ! -f "$FLASH/done" ] || skipped "it was built before: $(cat "$FLASH/done")"
  mkdir -p "$FLASH"
  rm -f "$FLASH/failed"
  # In a session of its own, so that it outlives this command; nice, so that the tests come first.
  setsid nohup nice -n 19 bash -c '
    if PATH="$1:$PATH" "$2" scripts/flash_attn_build.py "$3" "$4" ${5:+"$5"}; then date -u >"$4/done"; else date -u >"$4/failed"; fi' \
    flash "$(dirname "$(command -v "$BASE")")" "$PY" "$(flash_sdist)" "$FLASH" "${full[@]}" \
    >"$FLASH/build.log" 2>&1 </dev/null &
  echo $! >"$FLASH/pid"
  echo "started, process $!; its log is flash/build.log"
}

install_flash() { # the folder of its wheel
  "$PY" -m pip install --no-index --no-deps --force-reinstall --disable-pip-version-check "$1"/flash_attn-*.whl
  "$PY" -c 'import flash_attn; print("flash-attn", flash_attn.__version__)'
}

stage_flash-wait() {
  has_flash && { echo "installed"; return; }
  [ "$DEVICE" = cuda ] || skipped "flash-attn needs CUDA"
  [ -f "$FLASH/pid" ] || skipped "no build of flash-attn was started; see stage flash-start"
  while [ ! -f "$FLASH/done" ]; do
    if [ -f "$FLASH/failed" ] || ! kill -0 "$(cat "$FLASH/pid")" 2>/dev/null; then
      tail -n 30 "$FLASH/build.log"
      return 1
    fi
    sleep 2
  done
  install_flash "$FLASH/dist"
}

# Between two stages: a build that is done is used at once.
adopt_flash() {
  if [ -f "$FLASH/done" ] && [ ! -f "$FLASH/installed" ]; then
    if install_flash "$FLASH/dist" >"$LOGS/flash-install.log" 2>&1; then
      note "flash-attn was built and installed $SECONDS s after this call's start"
    else
      note "flash-attn was built but can not be installed: $(tail -n 1 "$LOGS/flash-install.log")"
    fi
    touch "$FLASH/installed"
  fi
}

# gpu_tests BUDGET FILE...: those marked gpu on a GPU, all quick ones on the CPU. Each result is written when it is
# there; past the budget pytest ends by itself and says what it left out. What may share the GPU does.
gpu_tests() {
  local budget="$1" marker="not slow" workers=()
  shift
  [ "$DEVICE" = cpu ] || marker=gpu
  if [ "$JOBS" -ge 8 ] && "$PY" -c 'import xdist' 2>/dev/null; then workers=(-n 8); fi
  local pytest=("$PY" -m pytest -p gpu_results --gpu-results "$RUN/tests.jsonl" -q --timeout 90 --durations 5
    -o cache_dir="$WORK/pytest" --session-timeout "$((budget > 20 ? budget - 10 : budget))")
  export PYTHONPATH="$ROOT/scripts"
  local status=0 alone=0
  "${pytest[@]}" -m "$marker and not alone" "${workers[@]}" "$@" || status=$?
  "${pytest[@]}" -m "$marker and alone" "$@" || alone=$?
  # 5: nothing was to be done.
  [ "$status" -eq 0 ] || [ "$status" -eq 5 ] || return "$status"
  [ "$alone" -eq 0 ] || [ "$alone" -eq 5 ] || return "$alone"
}

stage_aliasing() { gpu_tests "$1" tests/py/gpu/test_gpu_{aliasing,epochs,memory,random}.py; }
stage_engine() { gpu_tests "$1" tests/py/gpu/test_gpu_engine.py; }
stage_families() { gpu_tests "$1" tests/py/gpu/test_gpu_families.py; }
stage_features() { gpu_tests "$1" tests/py/gpu/test_gpu_features.py; }
stage_kernel_tests() { gpu_tests "$1" tests/py/gpu/test_gpu_kernels.py; }

stage_flash_tests() {
  [ "$DEVICE" = cpu ] || has_flash || skipped "flash-attn is not installed"
  gpu_tests "$1" tests/py/gpu/test_gpu_kernels.py tests/py/gpu/test_gpu_engine.py -k "flash or graphs or bfloat16"
}

stage_sanitizer() {
  gpu_tests "$1" tests/py/gpu/test_gpu_sanitizer.py -rs | tee "$RUN/sanitizer.txt"
  if [ "$DEVICE" = cuda ] && grep -q '^[0-9]* skipped' "$RUN/sanitizer.txt"; then
    skipped "$(sed -n 's/^SKIPPED .*: //p' "$RUN/sanitizer.txt" | sort -u | paste -sd ';')"
  fi
}

need_gtest_here() {
  printf '#include <gtest/gtest.h>\n' | "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null && return
  [ -d "$WORK/gtest/include" ] && return
  [ -d "$CARRY/googletest" ] || skipped "GoogleTest is neither installed nor carried"
  cmake -S "$CARRY/googletest" -B "$WORK/gtest-build" -DBUILD_GMOCK=OFF -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_INSTALL_PREFIX="$WORK/gtest"
  cmake --build "$WORK/gtest-build" --parallel "$JOBS" --target install
}

stage_ctest() {
  PATH="$(dirname "$(command -v "$BASE")"):$PATH"
  need_gtest_here
  local generator=()
  command -v ninja >/dev/null && generator=(-G Ninja)
  cmake -S . -B "$WORK/cpp" "${generator[@]}" -DCMAKE_PREFIX_PATH="$WORK/gtest"
  cmake --build "$WORK/cpp" --parallel "$JOBS"
  local environment=()
  [ "$DEVICE" = cpu ] || environment=(FLEXINFER_TEST_REAL_CUDA=1)
  env "${environment[@]}" ctest --test-dir "$WORK/cpp" --parallel "$((JOBS < 8 ? JOBS : 8))" \
    --output-on-failure --no-tests=error --timeout 60
  if [ "$DEVICE" = cuda ]; then
    local count
    count="$(env "${environment[@]}" ctest --test-dir "$WORK/cpp" -N -R RealCuda | sed -n 's/^Total Tests: //p')"
    echo "conformance cases on the real driver: $count"
    [ "$count" -gt 0 ]
  fi
}

# benchmark NAME BUDGET OPTION...: it keeps its numbers as it goes, and ends by itself in time.
benchmark() {
  local name="$1" budget="$2" quick=()
  shift 2
  [ "$DEVICE" = cuda ] || quick=(--quick)
  "$PY" "benchmarks/$name/bench.py" --device "$DEVICE" "${quick[@]}" --json "$RUN/${AS:-$name}.json" \
    --seconds "$((budget > 30 ? budget - 15 : 15))" "$@" 2>&1 | tee "$RUN/${AS:-$name}.txt"
}

stage_api_latency() { benchmark api_latency "$1"; }
stage_kernels() { benchmark kernels "$1"; }
stage_gpu_overlap() { benchmark gpu_overlap "$1"; }
stage_full_budget() { benchmark full_budget "$1"; }
stage_end_to_end() { benchmark end_to_end "$1"; }

stage_flash_kernels() {
  [ "$DEVICE" = cpu ] || has_flash || skipped "flash-attn is not installed"
  AS=flash_kernels benchmark kernels "$1" --kernels sdpa,flash-attn,flash-attn-3
}

stage_flash_budget() {
  [ "$DEVICE" = cpu ] || has_flash || skipped "flash-attn is not installed"
  AS=flash_budget benchmark full_budget "$1" --fraction 0.2 --runs flexinfer,pages
}
