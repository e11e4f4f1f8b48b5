# Shared by the scripts of this folder: messages, stages with their time, a verdict at the end, and
# what to do about a missing system package. Sourced, never run; bash >= 4.
#
#   begin NAME      first call: moves to the repository root; from here on NAME gets a verdict
#   stage TEXT      opens a named stage; its time is printed when the next one opens
#   say TEXT        one line for the reader
#   quietly LOG CMD run a long command with its output in LOG; on failure its end is shown
#   need_packages   install Debian packages where we may, else name the command and stop
#   want_browser    install Chromium where we may, else go on without

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${FLEXINFER_VENV:-$ROOT/.venv}"
PY="$VENV/bin/python"
LOGS="$ROOT/build/logs"

task=""
stage_name=""
stage_start=0

say() { printf '[%s] %s\n' "${task:-flexinfer}" "$*"; }

die() {
  say "error: $*" >&2
  exit 1
}

begin() {
  task="$1"
  cd "$ROOT"
  mkdir -p "$LOGS"
  trap verdict EXIT
}

end_stage() {
  if [ -n "$stage_name" ]; then say "    $((SECONDS - stage_start)) s for: $stage_name"; fi
}

stage() {
  end_stage
  stage_name="$*"
  stage_start=$SECONDS
  say "==> $stage_name"
}

# The exit trap: the last line that a reader, or a CI log, sees.
verdict() {
  local status=$?
  if [ "$status" -eq 0 ]; then
    end_stage
    echo "$task: PASSED in $SECONDS s"
  else
    echo "$task: FAILED in $SECONDS s${stage_name:+, at: $stage_name} (exit status $status)" >&2
  fi
}

quietly() {
  local log="$LOGS/$1.log" status=0
  shift
  "$@" >"$log" 2>&1 </dev/null || status=$?
  [ "$status" -ne 0 ] || return 0
  say "failed: $*" >&2
  say "last lines of $log:" >&2
  tail -n 40 "$log" >&2
  return "$status"
}

# need_packages REASON PACKAGE...: returns only when they are installed.
need_packages() {
  local reason="$1"
  shift
  local sudo=()
  if ! command -v apt-get >/dev/null; then
    die "$reason. This is not Debian or Ubuntu: install what corresponds to: $*"
  fi
  if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
      say "$reason. Run this, then try again:" >&2
      say "    sudo apt-get update && sudo apt-get install -y $*" >&2
      exit 1
    fi
    sudo=(sudo -n)
  fi
  say "$reason: installing $* by apt-get"
  quietly apt-update "${sudo[@]}" apt-get update || say "apt-get update failed; trying all the same"
  quietly apt-install "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "$@" ||
    die "apt-get could not install: $*"
}

# The page's tests drive Chromium. They are skipped, and say so, where it can not be had.
want_browser() {
  command -v chromium >/dev/null && command -v chromedriver >/dev/null && return
  (need_packages "no Chromium for the page's tests" chromium chromium-driver) || say "going on without a browser"
}

# A compiler that knows C++20's <span>; 1 s at most.
need_compiler() {
  local cxx="${CXX:-c++}"
  command -v "$cxx" >/dev/null || need_packages "no C++ compiler ($cxx) found" g++
  printf '#include <span>\nint main() {}\n' | "$cxx" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null ||
    die "$("$cxx" --version | head -n 1) does not compile C++20: g++ >= 10 or clang >= 13 is needed"
}

need_gtest() {
  local cxx="${CXX:-c++}"
  printf '#include <gtest/gtest.h>\n' | "$cxx" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null ||
    need_packages "GoogleTest is not installed" libgtest-dev
}
