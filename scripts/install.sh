#!/usr/bin/env bash
# make test-install: what `pip install .` gives, not editable: a wheel is built, unpacked into a folder of
# its own, and used from there to generate text with the model that it ships.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

begin "make test-install"
setup_venv dev
rm -rf build/dist build/installed
stage "build the wheel"
quietly pip-wheel "$PY" -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation \
  -C build-dir=build/wheel -C cmake.define.VTENSOR_WERROR=ON -w build/dist .
quietly pip-target "$PY" -m pip install --disable-pip-version-check --no-deps --target build/installed build/dist/*.whl
stage "generate text with it"
# -S: without the hook of the editable flexinfer in .venv.
(cd / && "$PY" -S - "$ROOT/build/installed" "$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PYTHON'
import sys

sys.path[:0] = sys.argv[1:]
import flexinfer
from flexinfer import LLM, SamplingParams
from flexinfer.cli.settings import SHIPPED_MODEL

assert flexinfer.__file__.startswith(sys.argv[1]), flexinfer.__file__
llm = LLM(str(SHIPPED_MODEL))
print(llm.generate("Hello", SamplingParams(max_tokens=8))[0].outputs[0].text)
llm.close()
PYTHON
)
