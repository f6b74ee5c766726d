# Every target sets up .venv by itself; a second run is quick. PYTHON chooses the interpreter that makes it.
PYTHON ?= python3
# The version of torch and torch_npu; `make clean` before another one.
TORCH ?= 2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
# torch_npu's headers suffice to compile a part of the host NPU, and torch for everything else: further packages are
# installed in the meantime.
WITH_TORCH_NPU := $(VENV)/with_torch_npu
WITH_TORCH := $(VENV)/with_torch
INSTALLED := $(VENV)/installed

BUILT := $(VENV)/built
LIBRARIES_WITHOUT_TORCH := $(VENV)/built_libraries_without_torch
LIBRARIES_OF_HOST_NPU := $(VENV)/built_libraries
BUILT_HOST_NPU := $(VENV)/built_host_npu
SOURCES := setup.py $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.py')
HOST_NPU_SOURCES := host-npu/setup.py $(shell find host-npu/csrc -name '*.cpp' -o -name '*.h' -o -name '*.py')
# Without bytecode, which Python writes when a module is imported: an eighth of the time.
PIP := $(RUN) -m pip install --disable-pip-version-check --no-compile
# Only the longest downloads show their progress.
QUIET_PIP := $(PIP) --quiet

# If torch_npu is installed without CANN, `import torch` fails (see torch_aclnn_ops/_torch_npu.py), and only this
# variable protects tools that import torch before this package. A simulated NPU also sets ASCEND_HOME_PATH.
CANN := $(shell ldconfig -p 2>/dev/null | grep -c libascendcl)$(if $(HOST_NPU_ENABLE),,$(ASCEND_HOME_PATH))
ifeq ($(CANN),0)
export TORCH_DEVICE_BACKEND_AUTOLOAD ?= 0
# There is no NPU: use a simulated one.
ON_NPU = $(RUN) -m host_npu
else
ON_NPU = $(RUN)
endif

.PHONY: setup demo test test-npu test-all docs matrix aarch64 lint bench gallery soak release-check precision phase-one collectives \
    asan tsan fuzz clean

setup:
	$(MAKE) --no-print-directory --jobs 3 $(INSTALLED) $(BUILT_HOST_NPU) $(BUILT)

$(WITH_TORCH_NPU):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make needs Python 3.11 or newer, as TRL and the tools of the tests do: name one with PYTHON=python3.11")'
	@echo "setup, 1 of 4: torch_npu $(TORCH), 0.1 GB; then torch, 0.2 GB from an index of CPU builds, otherwise with CUDA 3 GB"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps torch_npu==$(TORCH) numpy pyyaml
	touch $@

$(WITH_TORCH): | $(WITH_TORCH_NPU)
	$(PIP) torch==$(TORCH) "setuptools>=77" ninja
	$(PIP) torch_npu==$(TORCH)
	touch $@

# Without build isolation, because the extensions are compiled against the installed torch and torch_npu.
$(INSTALLED): pyproject.toml host-npu/pyproject.toml | $(WITH_TORCH)
	@echo "setup, 2 of 4: the packages of examples and tests, 0.2 GB, while 3 and 4 compile"
	TORCH_ACLNN_NPU=0 TORCH_ACLNN_CPU=0 $(QUIET_PIP) --no-build-isolation --editable ".[examples,test,lint]"
	touch $@

$(BUILT): $(SOURCES) | $(WITH_TORCH)
	@echo "setup, 4 of 4: compiles the extensions, about two minutes on one core; the compiler writes to $(VENV)/build.log"
	TORCH_ACLNN_NPU=1 $(RUN) setup.py --quiet build_ext --inplace > $(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	touch $@

# pip hides what a build prints, so that the libraries are compiled before it.
$(LIBRARIES_WITHOUT_TORCH): $(HOST_NPU_SOURCES) | $(WITH_TORCH_NPU)
	@echo "setup, 3 of 4: compiles the host NPU, about two minutes on one core, half of it before torch is there"
	$(RUN) host-npu/csrc/build.py --without-torch
	touch $@

$(LIBRARIES_OF_HOST_NPU): $(LIBRARIES_WITHOUT_TORCH) | $(WITH_TORCH)
	$(RUN) host-npu/csrc/build.py
	touch $@

$(BUILT_HOST_NPU): $(LIBRARIES_OF_HOST_NPU) | $(INSTALLED)
	$(QUIET_PIP) --no-build-isolation --editable "./host-npu[test]"
	touch $@

demo: setup
	$(RUN) -m torch_aclnn_ops.doctor
	$(ON_NPU) examples/train_lm.py --device npu --dtype bfloat16 --minutes 2

test: setup
	$(RUN) -m pytest --quiet --numprocesses auto
	cd host-npu && ../$(RUN) -m pytest --quiet --numprocesses auto

# The operators' tests on a device, or on the host NPU, which also runs the tests marked `simulator`.
test-npu: setup
	$(ON_NPU) -m pytest --quiet --numprocesses auto tests/npu

# Also the grids of cases that are marked as exhaustive.
test-all: setup
	$(RUN) -m pytest --quiet --numprocesses auto -m ""
	cd host-npu && ../$(RUN) -m pytest --quiet --numprocesses auto -m ""

# The documentation in build/site; every warning is an error, which --quiet would hide.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# Only the tools of the extra: the sources are read and not imported, so torch is not needed.
$(VENV)/docs: pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(QUIET_PIP) $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
	touch $@

# Every version of torch that is served, each in an environment of its own; ten minutes each, and downloads.
matrix:
	$(PYTHON) .ci/matrix.py

# A million random calls of the host NPU's phase one, compared with CANN's rules; some minutes.
phase-one: setup
	cd host-npu && ../$(RUN) -m tests.phase_one

# 10,000 random collectives of simulated NPUs, compared with their definitions; some minutes.
collectives: setup
	cd host-npu && ../$(RUN) -m tests.collectives

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	cd host-npu && ../$(RUN) -m mypy
	find csrc host-npu/csrc -name '*.cpp' -o -name '*.h' | xargs $(VENV)/bin/clang-format --dry-run -Werror

# Time and memory against peers: CSV files, plots and docs/performance.md, in a quarter of an hour on an idle machine.
# ONLY="drop_ins ema_adam" measures some, QUICK=--quick shows that it runs.
bench: setup
	$(RUN) -m benchmarks $(ONLY) $(QUICK)

# The pictures of the README and the guides; those of the benchmarks are drawn from their last results.
gallery: setup
	$(ON_NPU) examples/train_lm.py --device npu --dtype bfloat16 --minutes 4 --output runs/gallery
	$(RUN) -m benchmarks.gallery

# 20,000 steps on the CPU and on the NPU: does anything grow?
soak: setup
	$(RUN) -m benchmarks.soak
	$(ON_NPU) -m benchmarks.soak --device npu

# The archives of a release, in dist: built, checked by the usual tools, installed elsewhere and run.
release-check: setup .release/bin/twine
	$(RUN) .ci/release.py .release/bin/python

.release/bin/twine:
	$(PYTHON) -m venv .release
	.release/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 check-wheel-contents==0.6.3 twine==7.0.0 "setuptools>=77"

# The errors of every operator against float64, in docs/precision.md.
precision: setup
	$(ON_NPU) -m benchmarks.errors

# The compiled parts under the compiler's sanitizers: addresses and undefined behaviour, and threads.
asan: setup
	cd host-npu && ../$(RUN) -m tests.sanitizers asan
	$(RUN) .ci/sanitizers.py

tsan: setup
	cd host-npu && ../$(RUN) -m tests.sanitizers tsan

# Random arguments, for TIME seconds each: compared with torch, and for the simulated C functions, which takes clang.
TIME ?= 60
fuzz: setup
	$(RUN) -m tests.fuzz --seconds $(TIME)
	cd host-npu && ../$(RUN) -m tests.fuzz --seconds $(TIME)

# Cross-compiled for aarch64, and tested under emulation.
aarch64: $(INSTALLED)
	$(RUN) .ci/aarch64.py

clean:
	rm -rf $(VENV) .aarch64 .release build dist runs *.egg-info torch_aclnn_ops/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	$(MAKE) -C host-npu clean
	find . -name __pycache__ -prune -exec rm -rf {} +
