# Needs Python >= 3.10, a C++17 compiler and make; everything else goes into .venv.
#
#   make demo     trains a language model on real text, verifies the promise, draws the report
#   make test     the whole test suite
#   make docs     the documentation site, in build/site; a broken link fails
#   make help     the other targets
#
# Variables: PYTHON=python3.12 another interpreter; PIP_ARGS=... for example an index with CPU-only builds of torch;
# RUNS=folder where the demo writes; PYTEST_ARGS="-k journal" part of the suite; TEST_PROCESSES=0 one test at a time, in
# this process, which --pdb and -s need.

PYTHON ?= python3
VENV ?= .venv
RUNS ?= runs
PIP_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
NATIVE_SOURCES := $(shell find csrc -path csrc/tests -prune -o -type f -print)
CPP_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')
JOBS := $(shell getconf _NPROCESSORS_ONLN)
# Files of tests at a time: half of the tests keep one processor busy, or wait for another rank. Not more with more
# processors, since each has ranks and an imported DeepSpeed of its own. Files in their order: long ones are not last.
TEST_PROCESSES ?= $(if $(filter 1,$(JOBS)),0,2)
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
NATIVE = $(MAKE) --no-print-directory -f csrc/tests/Makefile
NATIVE_TESTS = $(NATIVE) -j$(JOBS)
OLD_DEEPSPEED := build/deepspeed-0.18.0
SVE_BYTES := 16 32 64
emulated_cpu = -cpu max,sve-default-vector-length=$(1)
TARGETS := demo test docs build lint types format native-test sanitize arm-test arm-python-test old-cpu-test grace cuda-kernels \
    old-deepspeed-test fresh-clone-test clean

.DEFAULT_GOAL := help
.PHONY: help FORCE $(TARGETS)
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))
	@echo "Targets: $(TARGETS)"

# ---- what everybody runs --------------------------------------------------------------------------------------------

demo: $(VENV)/.demo-ready
	$(BIN)/superoffload train --out $(RUNS)/train
	$(BIN)/superoffload verify --out $(RUNS)/verify
	@echo
	@echo "Reports, to open in a browser:"
	@ls $(abspath $(RUNS))/train/*.html $(abspath $(RUNS))/verify/*.html

test: $(VENV)/.test-ready
	$(PYTEST) $(PYTEST_ARGS)

docs: $(VENV)/.docs-requirements
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# ---- set-up; a stamp file says what is done, so that it is done once ------------------------------------------------

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("superoffload needs Python >= 3.10, and $(PYTHON) is " + sys.version.split()[0] + "; choose another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo-requirements: requirements/demo.txt $(VENV)/.created
	$(PIP_INSTALL) -r $<
	@touch $@

# Without isolation: DeepSpeed comes as sources, and is packed with the setuptools that is pinned.
$(VENV)/.test-requirements: requirements/test.txt requirements/deepspeed.txt requirements/integrations.txt $(VENV)/.demo-requirements
	DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation -r $<
	@touch $@

$(VENV)/.docs-requirements: requirements/docs.txt $(VENV)/.demo-requirements
	$(PIP_INSTALL) -r $<
	@touch $@

# Editable: Python changes need nothing; a change to the C++ sources compiles just what it touches.
$(VENV)/.built: $(NATIVE_SOURCES) setup.py pyproject.toml superoffload/_version.py | $(VENV)/.demo-requirements
	SUPEROFFLOAD_BUILD_DIR=$(CURDIR)/build/native $(PIP_INSTALL) --quiet --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.demo-ready: $(VENV)/.demo-requirements $(VENV)/.built
	@touch $@

$(VENV)/.test-ready: $(VENV)/.test-requirements $(VENV)/.built
	@touch $@

build: $(VENV)/.built

# ---- checks ---------------------------------------------------------------------------------------------------------

lint: $(VENV)/.test-requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(VENV)/.test-requirements
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

types: $(VENV)/.test-requirements
	$(BIN)/mypy

# The kernels and the worker pool without Python, warnings being errors; then whether the sets keep to themselves.
native-test:
	$(NATIVE_TESTS) check
	$(NATIVE_TESTS) isolation

# AddressSanitizer and UBSan over everything, ThreadSanitizer over what threads share.
sanitize:
	$(NATIVE_TESTS) check VARIANT=asan
	$(NATIVE_TESTS) check VARIANT=tsan

# Cross-compiled and emulated. Then one battery on every set of both architectures, SVE at 128, 256 and 512 bits: the
# digests must be the same. Needs g++-aarch64-linux-gnu and qemu-user-static.
arm-test:
	$(NATIVE_TESTS) isolation MACHINE=aarch64
	$(NATIVE_TESTS) check MACHINE=aarch64 EMULATOR_FLAGS="$(call emulated_cpu,16)"
	$(NATIVE_TESTS) all
	$(MAKE) --no-print-directory -j$(JOBS) $(SVE_BYTES:%=build/digests/sve-%) build/digests/host
	for bytes in $(SVE_BYTES); do diff build/digests/host build/digests/sve-$$bytes || exit 1; done
	@cat build/digests/host
	@echo "equal on this machine and on ARM, SVE vectors of $(SVE_BYTES) bytes"

build/digests/host: FORCE
	@mkdir -p $(@D)
	$(NATIVE) --silent battery BATTERY_FLAGS=--full > $@
build/digests/sve-%: FORCE
	@mkdir -p $(@D)
	$(NATIVE) --silent battery MACHINE=aarch64 EMULATOR_FLAGS="$(call emulated_cpu,$*)" BATTERY_FLAGS=--full > $@

# The extension itself under an ARM Python: exits 75 where it cannot be had.
arm-python-test: $(VENV)/.demo-requirements
	PYTHON=$(abspath $(BIN)/python) scripts/arm_python_test.sh

# Cycles per parameter on Neoverse V2, by static analysis: exits 77 without clang and llvm-mca.
grace:
	$(PYTHON) benchmarks/grace/mca.py --require

# The accelerator's kernels with nvcc, warnings and spilled registers being errors; needs no GPU.
CUDA_ARCHS := 80 90 100
cuda-kernels: $(CUDA_ARCHS:%=build/cuda/sm_%.cubin)

build/cuda/sm_%.cubin: $(wildcard csrc/cuda/*.cu csrc/cuda/*.cuh csrc/cuda/options.txt)
	@mkdir -p $(@D)
	nvcc --cubin --gpu-architecture=sm_$* $(shell cat csrc/cuda/options.txt) --Werror all-warnings \
	    --ptxas-options=--warning-as-error,--warn-on-spills,--warn-on-local-memory-usage csrc/cuda/kernels.cu -o $@

# The same binary on a CPU without AVX: it must choose the scalar set and not meet an unknown instruction.
old-cpu-test:
	$(NATIVE_TESTS) check MACHINE=x86_64 EMULATOR=qemu-x86_64-static EMULATOR_FLAGS="-cpu Nehalem"

# The oldest DeepSpeed that the adapter knows, in front of the newest one, which the tests have.
old-deepspeed-test: $(OLD_DEEPSPEED)/.installed $(VENV)/.test-ready
	PYTHONPATH=$(CURDIR)/$(OLD_DEEPSPEED) $(PYTEST) $(addprefix tests/deepspeed/test_,$(OLD_DEEPSPEED_TESTS:=.py))

OLD_DEEPSPEED_TESTS := switch against_stock checkpoints readers

$(OLD_DEEPSPEED)/.installed: $(VENV)/.test-requirements
	rm -rf $(@D)
	DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation --no-deps --target $(@D) deepspeed==$(OLD_DEEPSPEED:build/deepspeed-%=%)
	@touch $@

fresh-clone-test:
	PYTHON=$(PYTHON) .ci/fresh-clone

clean:
	rm -rf $(VENV) build dist *.egg-info superoffload/_native*.so
