# Builds one configuration of the C++ library and runs its tests. Sourced after setup_venv.sh.
#
#   cpp_tests NAME OPTION...    build/NAME, cmake -DOPTION..., ctest; e.g. cpp_tests asan VTENSOR_ASAN=ON

JOBS="${JOBS:-$(nproc)}"

cpp_configure_and_build() {
  local name="$1"
  shift
  quietly "cmake-$name" "$VENV/bin/cmake" -S . -B "build/$name" -G Ninja \
    -DCMAKE_MAKE_PROGRAM="$VENV/bin/ninja" -DVTENSOR_WERROR=ON "${@/#/-D}"
  quietly "build-$name" "$VENV/bin/cmake" --build "build/$name" --parallel "$JOBS"
}

# ASLR off where the system allows it: gcc < 14 ThreadSanitizer refuses layouts with many random bits.
without_aslr() {
  if setarch "$(uname -m)" -R true 2>/dev/null; then
    setarch "$(uname -m)" -R "$@"
  else
    "$@"
  fi
}

cpp_tests() {
  local name="$1"
  cpp_configure_and_build "$@"
  say "built; running the tests"
  ASAN_OPTIONS="detect_stack_use_after_return=1:${ASAN_OPTIONS:-}" \
    UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}" \
    TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}" \
    quietly "ctest-$name" without_aslr "$VENV/bin/ctest" --test-dir "build/$name" \
    --parallel "$JOBS" --output-on-failure --no-tests=error
  grep -E 'tests passed|tests failed|Total Test time' "$LOGS/ctest-$name.log"
}
