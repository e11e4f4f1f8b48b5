#!/usr/bin/env bash
# make docs: docs/ as a web site under build/site, every broken link an error.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

begin "make docs"
setup_venv dev
stage "install mkdocs"
quietly pip-docs "$PY" -m pip install --disable-pip-version-check -c constraints.txt 'mkdocs>=1.6,<2'
stage "build the site"
"$VENV/bin/mkdocs" build --strict --quiet --site-dir build/site
say "open build/site/index.html"
