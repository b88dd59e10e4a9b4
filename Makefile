# Two commands a new user needs: `make chat` and `make test`. The environment lives in .venv and is reused.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup chat lint test test-slow test-gpu

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

chat: setup
	$(BIN)/runtime chat

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup
	$(BIN)/pytest -n 2 -m "not slow and not gpu"

test-slow: setup
	$(BIN)/pytest -n 2 -m "slow and not gpu" --timeout 700

# On a machine with a CUDA device; uses the interpreter that is there, which must have torch, triton and pytest.
test-gpu:
	$(PYTHON) -m pytest -m gpu
