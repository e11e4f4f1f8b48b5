#!/usr/bin/env bash
# make test: build the C++ core and run its tests by ctest, then the Python tests by pytest.
#
#   scripts/test.sh             everything but the tests marked slow
#   scripts/test.sh slow        only those marked slow, with lm-eval installed for them
#   scripts/test.sh soak        only the soak, three minutes
#
# The Python tests are spread over the cores, file by file. PYTEST_ARGS goes to pytest, e.g.
# PYTEST_ARGS='-k prefix -x', or PYTEST_ARGS='-n 0 --pdb' for one process.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
source "$(dirname "${BASH_SOURCE[0]}")/cpp_tests.sh"

read -r -a pytest_args <<<"${PYTEST_ARGS:-}"

if [ "${1:-}" = slow ]; then
  begin "make test-slow"
  setup_venv eval
  stage "Python tests marked slow (pytest)"
  status=0
  "$PY" -m pytest -m slow --durations=0 --durations-min=5 "${pytest_args[@]}" || status=$?
  [ "$status" -ne 5 ] || say "no test is marked slow"
  exit $((status == 5 ? 0 : status))
fi

if [ "${1:-}" = soak ]; then
  begin "make soak"
  setup_venv dev
  stage "Soak: a server under mixed load (pytest)"
  "$PY" -m pytest -s tests/py/server/test_soak.py "${pytest_args[@]}"
  exit 0
fi

begin "make test"
setup_venv dev
need_gtest
want_browser
stage "C++ core: build and test (ctest)"
cpp_tests core
stage "Python: test (pytest)"
# A process costs 10 s and 1 GB for torch and transformers. In the order of collection: the folders with
# servers and browsers come first, so that no long file is left to one process at the end.
"$PY" -m pytest -m "not slow" -n "$((JOBS < 4 ? JOBS : 4))" --dist loadfile --no-loadscope-reorder \
  --durations=8 --durations-min=5 "${pytest_args[@]}"
