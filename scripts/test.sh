#!/usr/bin/env bash
# make test: build the C++ core and run its tests by ctest, then the Python tests by pytest.
#
#   scripts/test.sh             everything but the tests marked slow
#   scripts/test.sh slow        only those marked slow
#
# PYTEST_ARGS goes to pytest, e.g. PYTEST_ARGS='-k prefix -x'.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
source "$(dirname "${BASH_SOURCE[0]}")/cpp_tests.sh"

read -r -a pytest_args <<<"${PYTEST_ARGS:-}"

if [ "${1:-}" = slow ]; then
  begin "make test-slow"
  setup_venv dev
  stage "Python tests marked slow (pytest)"
  status=0
  "$PY" -m pytest -m slow "${pytest_args[@]}" || status=$?
  [ "$status" -ne 5 ] || say "no test is marked slow"
  exit $((status == 5 ? 0 : status))
fi

begin "make test"
setup_venv dev
need_gtest
want_browser
stage "C++ core: build and test (ctest)"
cpp_tests core
stage "Python: test (pytest)"
"$PY" -m pytest -m "not slow" --durations=8 --durations-min=5 "${pytest_args[@]}"
