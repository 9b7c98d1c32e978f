# On a machine with Python (3.10 or newer) and make, each target does its own set-up.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/installed

TIME ?= 600

.PHONY: demo test check fuzz clean

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Every reader for its share of TIME seconds; atheris guides, where it is installed: fuzz ARGS='--guided --target plan'.
fuzz: $(STAMP)
	PYTHONPATH=.:tests/fuzz:tests/support $(BIN)/python tests/fuzz/run.py --time $(TIME) $(ARGS)

clean:
	rm -rf $(VENV) build found .corpus-* .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Installed again only when what is to be installed changes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,test]'
	@touch $@
