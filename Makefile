# make build   environment in .venv, extension in build/<variant>
# make run     generation through transformers, against sdpa
# make test    the tests; PYTEST="-k name" picks some
# PYTHON=      the interpreter that makes the environment (3.10 or later)
# VENV=        another place for the environment
# CXX=         the C++ compiler

PYTHON ?= python3
VENV ?= .venv
SANITIZE ?= address,undefined

STAMP := $(VENV)/.requirements
BIN := $(VENV)/bin
BUILD := $(BIN)/python tools/local_build.py --cxx $(CXX)
CXX_SOURCES = $(wildcard torch-ext/*.cpp torch-ext/*.h paged_decode_*/*.cpp paged_decode_*/*.h)

# kernels.get_kernel takes this directory for the name. It names the variant itself: a torch with CUDA would otherwise
# look for a CUDA variant, with or without a GPU.
VARIANT := torch-stable-abi211-cpu-$(shell uname -m)-linux
export LOCAL_KERNELS ?= org/paged-attn=$(CURDIR)/build/$(VARIANT)

.PHONY: build run test test-sanitize lint format bench clean
.DEFAULT_GOAL := build

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; name one with PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	@touch $@

build: $(STAMP)
	$(BUILD)

run: build
	$(BIN)/python examples/generate.py

test: build
	$(BIN)/python -m pytest tests $(PYTEST)

# A sanitizer's runtime must be in the process before Python loads the extension; libstdc++ comes along because the
# runtime looks up its exception functions at start. Python's own leaks are not of interest.
runtime = $(shell $(CXX) -print-file-name=$(1))
test-sanitize: $(STAMP)
	$(BUILD) --sanitize $(SANITIZE)
	LOCAL_KERNELS=org/paged-attn=$(CURDIR)/build-sanitize/$(VARIANT) \
	LD_PRELOAD="$(call runtime,libasan.so) $(call runtime,libubsan.so) $(call runtime,libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -m pytest tests -m sanitize $(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: build
	$(BIN)/python benchmarks/compare_cpu.py

clean:
	rm -rf build build-sanitize
