# Two commands are all a newcomer needs; each makes its own environment in .venv first.
#   make benchmark   run the main job on this machine's CPU, beside stock transformers
#   make test        run every check and every test
# make test-ascend runs that part of the tests that has the released torch_npu, on stub CANN libraries.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: benchmark test test-ascend lint clean

# ARGS="--model_path=... --batch_size=4" reach the script
benchmark: $(INSTALLED)
	$(BIN)/python benchmark/npu/benchmark_qwen.py $(ARGS)

# CI=1: torch and hypothesis are stricter where it is set, and a test that passes here passes there
TESTS := CI=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test: lint
	$(TESTS) $(ARGS)

test-ascend: $(INSTALLED)
	$(TESTS) tests/ascend tests/simulate --dist load $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3.11 found; install Python 3.11 or call make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[cpu,benchmark,simulate,test]"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
