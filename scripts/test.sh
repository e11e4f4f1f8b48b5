#!/usr/bin/env bash
# make test: build the C++ core and run its tests by ctest, then the Python tests by pytest.
#
#   scripts/test.sh             everything but the tests marked slow
#   scripts/test.sh slow        only those marked slow, with lm-eval and heavy clients installed for them
#   scripts/test.sh replicas    the tests of replicas, with Ray installed for them
#   scripts/test.sh soak        only the soak, three minutes
#   scripts/test.sh pypi-torch  the tests that ask torch for a GPU, with PyPI's CUDA build of torch
#                               (in .venv-pypi, 5.6 GB), as a machine has it that knows PyPI alone
#
# The Python tests are spread over the cores, file by file. PYTEST_ARGS goes to pytest, e.g.
# PYTEST_ARGS='-k prefix -x', or PYTEST_ARGS='-n 0 --pdb' for one process.
if [ "${1:-}" = pypi-torch ]; then
  FLEXINFER_VENV="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv-pypi"
  export FLEXINFER_VENV FLEXINFER_TORCH_INDEX=none PIP_CONFIG_FILE=/dev/null
  unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
source "$(dirname "${BASH_SOURCE[0]}")/cpp_tests.sh"

read -r -a pytest_args <<<"${PYTEST_ARGS:-}"

# In no extra that tests are installed with: for its size, and its start of ten seconds.
install_ray() {
  quietly pip-ray "$PY" -m pip install --disable-pip-version-check "ray[serve]==2.60.0"
}

if [ "${1:-}" = slow ]; then
  begin "make test-slow"
  setup_venv eval
  # Alone: it asks for a jiter and a rich that are older than those of all others, and needs neither.
  quietly pip-instructor "$PY" -m pip install --disable-pip-version-check --no-deps \
    "instructor==1.17.0" docstring-parser tenacity
  # Likewise: LangChain's suite, and of what it asks for what it imports here.
  quietly pip-langchain-tests "$PY" -m pip install --disable-pip-version-check --no-deps \
    "langchain-tests==1.1.9" syrupy pytest-asyncio pytest-socket pytest-benchmark pytest-codspeed \
    pytest-recording vcrpy py-cpuinfo wrapt
  install_ray
  stage "Python tests marked slow (pytest)"
  status=0
  "$PY" -m pytest -m slow --durations=0 --durations-min=5 "${pytest_args[@]}" || status=$?
  [ "$status" -ne 5 ] || say "no test is marked slow"
  exit $((status == 5 ? 0 : status))
fi

if [ "${1:-}" = replicas ]; then
  begin "make test-replicas"
  setup_venv dev
  install_ray
  stage "Python: tests of replicas on Ray (pytest)"
  # The deployed example takes a cluster of its own, 40 s more: `make test-slow` has it.
  "$PY" -m pytest --durations=8 --durations-min=5 "${pytest_args[@]}" --ignore=tests/py/replicas/test_example.py \
    tests/py/replicas tests/py/repo/test_exports.py
  exit 0
fi

if [ "${1:-}" = soak ]; then
  begin "make soak"
  setup_venv dev
  stage "Soak: a server under mixed load (pytest)"
  "$PY" -m pytest -s tests/py/server/test_soak.py "${pytest_args[@]}"
  exit 0
fi

if [ "${1:-}" = pypi-torch ]; then
  begin "make test-pypi-torch"
  setup_venv dev
  stage "Python tests that ask torch for a GPU, with torch $("$PY" -c 'import torch; print(torch.__version__)')"
  "$PY" -m pytest -m "not slow" -n "$((JOBS < 4 ? JOBS : 4))" --dist loadfile "${pytest_args[@]}" \
    tests/py/{memory,gpu,runner} tests/py/vtensor/test_cuda_*.py
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
