# Needs Python >= 3.10, a C++17 compiler and make; everything else goes into .venv.
#
#   make demo     fine-tunes a small language model with torch's AdamW and ours, draws both, verifies the promise
#   make test     the test suite; TEST_TURN=1/1 with the slowest tests, which CI runs in turns
#   make check    the quick part, for every change: lint, types, tests of one process, native tests; some 3 minutes
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
CPP_FILES := $(shell find csrc benchmarks/bandwidth -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')
JOBS := $(shell getconf _NPROCESSORS_ONLN)
# Files of tests at a time: half of the tests keep one processor busy, or wait for another rank. Not more with more
# processors, since each has ranks and an imported DeepSpeed of its own. Files in their order: long ones are not last.
TEST_PROCESSES ?= $(if $(filter 1,$(JOBS)),0,2)
# A process that crashes ends the run: pytest-xdist may wait for ever for the tests that it took with it.
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
NATIVE = $(MAKE) --no-print-directory -f csrc/tests/Makefile
NATIVE_TESTS = $(NATIVE) -j$(JOBS)
OLD_DEEPSPEED := build/deepspeed-0.18.0
SVE_BYTES := 32 64
emulated_cpu = -cpu max,sve-default-vector-length=$(1)
# The tests of `make check`: without ranks, training or programs of their own.
CHECKED := checkpoints/loading checkpoints/manifests checkpoints/saving engine/bucket_states \
    engine/placement engine/schedule engine/verdict engine/worker_faults kernels/bit_sums \
    kernels/float_environment kernels/journal kernels/kernels kernels/reference links/cuda/cuda_link \
    links/cuda/cuda_streams optimizer/adamw optimizer/cpu_adamw \
    optimizer/changed_groups optimizer/delivery optimizer/edited_gradients \
    optimizer/metrics optimizer/parameter_writes optimizer/timeline \
    optimizer/unknown_arguments optimizer/unusual_parameters optimizer/user_code project/docs project/packaging \
    project/public_names tools/plan tools/verify tools/command_line tools/doctor
TARGETS := demo test check docs build lint types format native-test clang-test sanitize-addresses sanitize-threads \
    sanitize arm-test arm-python-test old-cpu-test grace cuda-kernels old-deepspeed-test oldest-test newest-test \
    benchmarks-test fresh-clone-test release-test slot wheels wheel-test clean

.DEFAULT_GOAL := help
.PHONY: help FORCE $(TARGETS)
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))
	@echo "Targets: $(TARGETS)"

# ---- the commands of README --------------------------------------------------------------------------------------------

demo: $(VENV)/.demo-ready
	$(BIN)/python examples/demo.py --out $(RUNS)/demo
	$(BIN)/superoffload verify --quiet

test: export TEST_TURN ?= none
test: $(VENV)/.test-ready
	$(PYTEST) $(PYTEST_ARGS)

check: lint types native-test $(VENV)/.test-ready
	$(PYTEST) $(foreach test,$(CHECKED),tests/$(dir $(test))test_$(notdir $(test)).py)

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
$(VENV)/.test-requirements: $(addprefix requirements/,test.txt deepspeed.txt integrations.txt torchtitan.txt megatron.txt verl.txt axolotl.txt) $(VENV)/.demo-requirements
	DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation -r $<
	$(PIP_INSTALL) --no-deps -r requirements/torchtitan.txt
	$(PIP_INSTALL) --no-deps -r requirements/megatron.txt
	$(PIP_INSTALL) --no-deps -r requirements/verl.txt
	$(PIP_INSTALL) --no-deps -r requirements/axolotl.txt
	@touch $@

$(VENV)/.release-requirements: requirements/release.txt $(VENV)/.demo-requirements
	$(PIP_INSTALL) -r $<
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

# All that travels to a bare machine with a GPU. Then the commands to give there.
slot: $(VENV)/.test-ready
	$(BIN)/python -m benchmarks.gpu_suite.slot

# Wheels for x86-64 and ARM, of every Python from 3.10 on, and the archive of the sources, in dist/.
wheels: $(VENV)/.release-requirements
	$(BIN)/python scripts/release.py

# What a user does with the wheel of this machine. scripts/arm_python_test.sh dist/*aarch64.whl tries the ARM one.
wheel-test: $(VENV)/.release-requirements $(VENV)/.built
	PYTHON=$(PYTHON) .ci/wheel

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

# The extension's own objects without Python; then whether the instruction sets keep to themselves.
native-test: $(VENV)/.built
	$(NATIVE_TESTS) check VARIANT=shipped
	$(NATIVE_TESTS) isolation VARIANT=shipped

# The same, compiled by clang, whose warnings are errors here.
CLANG ?= clang++-19
clang-test:
	$(NATIVE_TESTS) check CXX=$(CLANG)
	$(NATIVE_TESTS) isolation CXX=$(CLANG)

# AddressSanitizer and UBSan over everything, ThreadSanitizer over what threads share.
sanitize: sanitize-addresses sanitize-threads
sanitize-addresses:
	$(NATIVE_TESTS) check VARIANT=asan
sanitize-threads:
	$(NATIVE_TESTS) check VARIANT=tsan

# Cross-compiled and emulated. Then one battery on every set of both architectures, SVE at 128 bits (Grace's) with many
# lengths, at 256 and 512 bits with some of them: the digests must be the same. Needs g++-aarch64-linux-gnu and
# qemu-user-static. ARM_VARIANT=shipped: with the objects that arm-python-test has just built.
ARM_VARIANT ?= plain
ARM := MACHINE=aarch64 VARIANT=$(ARM_VARIANT)
arm-test: $(VENV)/.built
	$(NATIVE_TESTS) isolation $(ARM)
	$(NATIVE_TESTS) check $(ARM) EMULATOR_FLAGS="$(call emulated_cpu,16)"
	$(NATIVE_TESTS) all VARIANT=shipped
	$(MAKE) --no-print-directory -j$(JOBS) build/digests/full-16 build/digests/full-host \
	    $(SVE_BYTES:%=build/digests/short-%) build/digests/short-host
	diff build/digests/full-host build/digests/full-16
	for bytes in $(SVE_BYTES); do diff build/digests/short-host build/digests/short-$$bytes || exit 1; done
	@cat build/digests/full-host
	@echo "equal on this machine and on ARM: SVE vectors of 16 bytes at many lengths, of $(SVE_BYTES) at some"

digests = $(NATIVE) --silent battery $(if $(filter host,$(1)),VARIANT=shipped,\
    $(ARM) EMULATOR_FLAGS="$(call emulated_cpu,$(1))")
build/digests/full-%: FORCE
	@mkdir -p $(@D)
	$(call digests,$*) BATTERY_FLAGS=--full > $@
build/digests/short-%: FORCE
	@mkdir -p $(@D)
	$(call digests,$*) > $@

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
old-cpu-test: $(VENV)/.built
	$(NATIVE_TESTS) kernels VARIANT=shipped MACHINE=x86_64 EMULATOR=qemu-x86_64-static EMULATOR_FLAGS="-cpu Nehalem" \
	    KERNEL_TESTS=every_combination

# The oldest DeepSpeed that the adapter knows, in front of the newest one, which the tests have.
old-deepspeed-test: $(OLD_DEEPSPEED)/.installed $(VENV)/.test-ready
	TEST_TURN=1/1 PYTHONPATH=$(CURDIR)/$(OLD_DEEPSPEED) $(PYTEST) $(addprefix tests/integrations/deepspeed/test_,$(OLD_DEEPSPEED_TESTS:=.py))

OLD_DEEPSPEED_TESTS := enabling against_stock stages_1_and_2 checkpoints_zero readers_zero3

$(OLD_DEEPSPEED)/.installed: $(VENV)/.test-requirements
	rm -rf $(@D)
	DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation --no-deps --target $(@D) deepspeed==$(OLD_DEEPSPEED:build/deepspeed-%=%)
	@touch $@

# Other versions of Python, torch and transformers: requirements/oldest.txt and newest.txt.
oldest-test newest-test: %-test: $(VENV)/.built
	.ci/other-versions $* || [ $$? = 75 ]  # which says what is missing

# Everything, before a release and after a change to csrc. `.ci/run` takes turns with what takes long.
release-test: export TEST_TURN = 1/1
release-test: lint types docs native-test clang-test sanitize arm-python-test
	$(MAKE) arm-test ARM_VARIANT=shipped
	$(MAKE) old-cpu-test grace cuda-kernels test old-deepspeed-test oldest-test newest-test
	$(MAKE) benchmarks-test fresh-clone-test wheel-test

# Every benchmark on little, to see that it works.
benchmarks-test: $(VENV)/.test-ready
	$(BIN)/python -m benchmarks.all --quick --out $$(mktemp -d)

fresh-clone-test:
	PYTHON=$(PYTHON) .ci/fresh-clone

clean:
	rm -rf $(VENV) build dist *.egg-info superoffload/_native*.so
