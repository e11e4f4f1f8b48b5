# What CI and people run alike. Each target says what it does, is quick the second time and ends with a
# verdict; the work is in scripts/. A fresh machine needs python3 >= 3.11, a C++20 compiler and make.
#
# Settings:  PYTHON=python3.12   JOBS=8   ARGS='...' (demo)   PYTEST_ARGS='-k prefix' (test)   BENCH=manager

SHELL := /bin/bash
export PYTHON JOBS PYTEST_ARGS
MAKEFLAGS += --no-print-directory

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-pypi-torch test-replicas test-install soak mutants sanitize lint format stubs map bench families docs dev clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: ## set up all that is needed and run the demo: six-turn chats that share memory
	@scripts/demo.sh $(ARGS)

test: ## set up, build, run the C++ tests (ctest) and the Python tests (pytest)
	@scripts/test.sh

test-slow: ## the Python tests marked slow
	@scripts/test.sh slow

test-pypi-torch: ## the tests that ask torch for a GPU, with PyPI's CUDA build of torch (5.6 GB more)
	@scripts/test.sh pypi-torch

test-replicas: ## the tests of replicas, with Ray installed for them
	@scripts/test.sh replicas

test-install: ## what `pip install .` gives: a wheel, unpacked and used
	@scripts/install.sh

soak: ## three minutes of mixed load on a server: nothing lost, wrong, or left behind
	@scripts/test.sh soak

mutants: ## put small faults into a copy, one at a time: tests must notice each; ARGS='--sample 6 --seed x'
	@scripts/mutants.sh $(ARGS)

sanitize: ## the C++ tests under ASan+UBSan and under TSan
	@scripts/sanitize.sh

lint: ## ruff, mypy, clang-format, clang-tidy
	@scripts/lint.sh

format: ## let ruff and clang-format repair what they can, then lint
	@scripts/lint.sh --fix

stubs: ## refresh python/flexinfer/_vtensor.pyi after a change of the bindings
	@scripts/stubs.sh

map: ## add new source files to docs/module_map.md
	@$${PYTHON:-python3} scripts/module_map.py

bench: ## run the benchmarks; numbers go to build/bench/*.json
	@scripts/bench.sh $(BENCH)

families: ## try all causal architectures of transformers: the table in docs/families.md
	@scripts/families.sh

docs: ## build the documentation site into build/site
	@scripts/docs.sh

dev: ## only set up .venv: editable flexinfer and all tools
	@scripts/setup_venv.sh dev

clean: ## remove what was built; .venv stays (rm -rf .venv removes it)
	rm -rf build dist .hypothesis .venv/.ready-*
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
