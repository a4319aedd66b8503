# The entire developer interface. `make demo` and `make test` work as the first command on a machine with Python and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUICK := $(BIN)/python -m pytest --quiet -p no:schemathesis -m 'not slow and not gpu'
STAMP := $(VENV)/.installed
# Both installers read the same pins and the group `dev` (PEP 735, pip from 25.1 on). An older uv knows no groups: pip is taken.
# `make UV=` takes pip where uv is installed too.
UV := $(shell uv pip install --help 2>/dev/null | grep -q -e --group && command -v uv)
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --no-compile) \
	--quiet --constraint constraints.txt

.PHONY: demo test quick test-gpu check bench pictures install lint clean

install: $(STAMP)  ## create .venv and install everything, pinned; by uv where one that knows groups is installed

$(STAMP): pyproject.toml constraints.txt hatch_build.py
	$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('Python 3.11 or newer is needed: make PYTHON=python3.12')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(UV),,$(BIN)/python -m pip install --quiet --constraint constraints.txt 'pip>=25.1')
	$(INSTALL) torch
	$(INSTALL) --editable '.[agent,archive,mcp,mlflow,notebook,otel,postgres,service]' --group dev
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # on all cores; some packages carry files of other Pythons
	touch $(STAMP)

demo: $(STAMP)  ## serve, tune a real DDP script, recommend, verify, train; under five minutes
	$(BIN)/python -m examples.demo

test: $(STAMP)  ## every test; says which ones this machine cannot run, and the ten slowest
	tests/system-packages.sh
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations 10

# In two processes, because the service's tests need no torch, which takes 3 s to import, and the others no database.
quick: $(STAMP)  ## what answers within a minute: wire, model, analysis, and parts of use cases, client and agent
	@$(QUICK) tests/agent tests/client tests/wire >$(VENV)/quick.log 2>&1 & job=$$!; trap "kill $$job 2>/dev/null" EXIT INT TERM; \
	$(QUICK) tests/service/perfmodel tests/service/analysis tests/service/usecases; service=$$?; \
	wait $$job; job=$$?; cat $(VENV)/quick.log; [ $$service = 0 ] && [ $$job = 0 ]

test-gpu: $(STAMP)  ## what only a GPU can show of the agent; needs one
	$(BIN)/python -m pytest tests/gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github examples/ci
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

check: $(STAMP)  ## what CI runs; the lint beside the tests, which leave cores idle, and printed after them
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; \
	$(MAKE) --no-print-directory test; tests=$$?; \
	wait $$lint; lint=$$?; cat $(VENV)/lint.log; [ $$tests = 0 ] && [ $$lint = 0 ]

pictures: $(STAMP)  ## the documents' pictures, from a real run; two minutes
	tests/system-packages.sh
	$(BIN)/python -m docs.pictures

bench: $(STAMP)  ## every benchmark, JSON under benchmarks/results
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) dist build
