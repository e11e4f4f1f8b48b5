#!/usr/bin/env bash
# make lint: every check that reads the code without running it. `scripts/lint.sh --fix` repairs what
# ruff and clang-format can repair first.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
source "$(dirname "${BASH_SOURCE[0]}")/cpp_tests.sh"

bin="$VENV/bin"
failed=()

# Runs all checks before it fails: one round shows everything.
check() {
  stage "$1"
  shift
  "$@" || failed+=("$stage_name")
}

clang_format() {
  # The places are enough: `make format` shows and repairs the rest.
  local out
  out="$("$bin/clang-format" --dry-run --Werror "$@" 2>&1)" && return 0
  grep -oE '^[^ :]+:[0-9]+:[0-9]+' <<<"$out" | cut -d: -f1 | uniq -c | sed 's/$/: places to format/'
  return 1
}

clang_tidy() {
  # Sources of the library, not the tests: gtest's macros cost minutes and find nothing. A file that
  # passed is not looked at again until it, a header or the configuration changes.
  local passed="build/tidy/passed" headers key file todo=()
  mkdir -p build/tidy
  touch "$passed"
  headers="$(find cpp -name '*.h' -o -name .clang-tidy | sort | xargs cat .clang-tidy | sha256sum | cut -c1-16)"
  while read -r file; do
    key="$headers $(sha256sum <"$file" | cut -c1-16) $file"
    grep -qxF "$key" "$passed" || todo+=("$file")
  done < <(find cpp/vtensor cpp/kernels -name '*.cpp' | sort)
  [ "${#todo[@]}" -gt 0 ] || return 0
  printf '%s\n' "${todo[@]}" |
    xargs -P "$JOBS" -n 1 "$bin/clang-tidy" --quiet -p build/tidy >build/tidy/out.log 2>build/tidy/err.log || {
    cat build/tidy/out.log
    grep -v 'warnings generated' build/tidy/err.log | tail -n 20
    return 1
  }
  for file in "${todo[@]}"; do
    echo "$headers $(sha256sum <"$file" | cut -c1-16) $file" >>"$passed"
  done
}

# The two that take long, side by side: mypy keeps one core busy.
mypy_and_clang_tidy() {
  stage "mypy (strict) and clang-tidy"
  "$bin/mypy" >"$LOGS/mypy.log" 2>&1 </dev/null &
  local mypy=$!
  clang_tidy || failed+=("clang-tidy")
  wait "$mypy" || failed+=("mypy (strict)")
  cat "$LOGS/mypy.log"
}

begin "make lint"
setup_venv dev
mapfile -t cpp_files < <(find cpp tests/cpp -name '*.cpp' -o -name '*.h' | sort)

if [ "${1:-}" = --fix ]; then
  stage "repair"
  "$bin/ruff" check --fix-only --quiet .
  "$bin/ruff" format --quiet .
  "$bin/clang-format" -i "${cpp_files[@]}"
fi
check "ruff format" "$bin/ruff" format --check .
check "ruff check" "$bin/ruff" check .
check "clang-format" clang_format "${cpp_files[@]}"
check "clang-tidy: configure" quietly cmake-tidy "$bin/cmake" -S . -B build/tidy -G Ninja \
  -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DVTENSOR_TESTS=OFF
mypy_and_clang_tidy

end_stage
stage_name=""
[ "${#failed[@]}" -eq 0 ] || die "failed: $(printf '%s; ' "${failed[@]}")many are repaired by: make format"
