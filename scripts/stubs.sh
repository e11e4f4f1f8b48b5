#!/usr/bin/env bash
# make stubs: copy the type stub that the build generated from the C++ bindings to the source tree, where
# mypy, editors and reviewers read it. tests/py/test_stubs.py fails while the two differ.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

begin "make stubs"
setup_venv dev
stage "build the extension and its stub"
generated="$("$PY" -c 'import pathlib, flexinfer._vtensor as m; print(pathlib.Path(m.__file__).with_name("_vtensor.pyi"))')"
cp "$generated" python/flexinfer/_vtensor.pyi
git --no-pager diff --stat -- python/flexinfer/_vtensor.pyi || true
