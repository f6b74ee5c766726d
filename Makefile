# Every target sets up .venv by itself; a second run is quick. PYTHON chooses the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/installed

# Where torch_npu is installed without CANN, `import torch` alone fails (see torch_aclnn_ops/_torch_npu.py); tools that
# import torch before this package can be kept from it by this variable only.
CANN := $(shell ldconfig -p 2>/dev/null | grep -c libascendcl)$(ASCEND_HOME_PATH)
ifeq ($(CANN),0)
export TORCH_DEVICE_BACKEND_AUTOLOAD ?= 0
endif

# An NPU if there is one. The host NPU is not built yet, so else the CPU.
DEVICE = $(shell $(RUN) -c "import torch_aclnn_ops, torch; print('npu' if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == 'npu' else 'cpu')")

.PHONY: setup demo test lint bench clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[npu,examples,test,lint]"
	touch $@

demo: setup
	$(RUN) -m torch_aclnn_ops.doctor
	$(RUN) examples/train_lm.py --device $(DEVICE) --minutes 2

test: setup
	$(RUN) -m pytest --quiet

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: setup
	for operator in mse_loss binary_cross_entropy embedding linear_cross_entropy ema_adam; do \
	    $(RUN) -m benchmarks.$$operator || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
