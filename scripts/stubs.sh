#!/usr/bin/env bash
# make stubs: copy the type stubs that the build generated from the C++ bindings to the source tree, where
# mypy, editors and reviewers read them. tests/py/repo/test_stubs.py fails while they differ.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

begin "make stubs"
setup_venv dev
stage "build the extensions and their stubs"
for module in _vtensor _kernels; do
  generated="$("$PY" -c "import pathlib, flexinfer.$module as m; print(pathlib.Path(m.__file__).with_name('$module.pyi'))")"
  cp "$generated" "python/flexinfer/$module.pyi"
done
git --no-pager diff --stat -- python/flexinfer/*.pyi || true
