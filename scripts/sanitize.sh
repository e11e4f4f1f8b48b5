#!/usr/bin/env bash
# make sanitize: the C++ tests again, under AddressSanitizer + UndefinedBehaviorSanitizer and under
# ThreadSanitizer. Arguments choose: `scripts/sanitize.sh asan`, `... tsan`; none = both.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
source "$(dirname "${BASH_SOURCE[0]}")/cpp_tests.sh"

begin "make sanitize"
setup_venv dev
need_gtest
for kind in "${@:-asan tsan}"; do
  for name in $kind; do
    stage "C++ tests under $name"
    # -O1: half the compile time of -O2, and stacks that a reader recognises.
    cpp_tests "$name" "VTENSOR_${name^^}=ON" CMAKE_BUILD_TYPE=None CMAKE_CXX_FLAGS=-O1
  done
done
