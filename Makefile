# Every target works from a bare clone: what it needs is installed into .venv first.
# ARGS= passes arguments on, e.g. `make test ARGS="-k tree -x"`, `make bench ARGS="engine --json out.json"`.
# TORCH= and PYTHON= override which torch build and which interpreter `install` takes.

VENV   ?= .venv
ARGS   ?=
TORCH  ?=
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
RUNTIME := $(VENV)/.flotilla-runtime
DEV     := $(VENV)/.flotilla-dev

.DEFAULT_GOAL := help
.PHONY: help install serve test test-thorough check format format-check lint types imports bench docs proto clean distclean

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(RUNTIME) ## create .venv with the `flotilla` command (does nothing when up to date)
	@echo "flotilla is in $(BIN); run it as $(BIN)/flotilla"

serve: $(RUNTIME) ## serve the embedded demo models over HTTP; ARGS="--config my.yaml"
	@$(BIN)/flotilla serve $(ARGS)

test: check ## what CI runs: the checks, then every test; ARGS="-k name"
	@$(BIN)/python -m pytest --numprocesses 2 $(ARGS)

test-thorough: check ## the same with long tests, and all examples of properties
	@$(BIN)/python -m pytest --numprocesses 2 --thorough $(ARGS)

check: $(DEV) ## formatting, linter, strict types, import contracts
	@$(MAKE) --no-print-directory --keep-going format-check lint types imports

format-check: $(DEV)
	$(BIN)/ruff format --check .

lint: $(DEV)
	$(BIN)/ruff check .

types: $(DEV)
	$(BIN)/mypy

imports: $(DEV)
	$(BIN)/lint-imports

format: $(DEV) ## rewrite the code in the project's format, and fix what the linter can fix
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(RUNTIME) ## measure; ARGS="engine --json FILE" (the default is `engine`) or "serve --url URL"
	@$(BIN)/flotilla bench $(or $(ARGS),engine)

docs: $(DEV) ## regenerate the documentation that is made from code
	@PYTHONPATH=. $(BIN)/python scripts/config_reference.py
	@PYTHONPATH=. $(BIN)/python scripts/chart_reference.py
	@PYTHONPATH=. $(BIN)/python scripts/compatibility_table.py
	@PYTHONPATH=. $(BIN)/python scripts/metric_reference.py
	@PYTHONPATH=. $(BIN)/python scripts/dashboards.py

proto: $(DEV) ## generate the Python code of the gRPC service from its .proto
	@$(BIN)/python scripts/generate_proto.py

clean: ## remove caches and build output; the installation stays
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	@rm -rf $(VENV)

# -- installation: two stamps, so that `serve` does not wait for the developers' tools ---------------

$(BIN)/python:
	@python="$$(PYTHON='$(PYTHON)' scripts/find_python.sh)" && echo "Creating $(VENV) with $$python" \
		&& "$$python" -m venv $(VENV)

$(RUNTIME): pyproject.toml scripts/install_torch.sh | $(BIN)/python
	@TORCH='$(TORCH)' scripts/install_torch.sh $(BIN)/python
	@echo "Installing Flotilla and what it depends on (a few minutes the first time)"
	@$(PIP) install -qq --editable .
	@touch $@

$(DEV): pyproject.toml scripts/install_torch.sh | $(BIN)/python
	@TORCH='$(TORCH)' scripts/install_torch.sh $(BIN)/python
	@echo "Installing Flotilla and the developers' tools (a few minutes the first time)"
	@$(PIP) install -qq --editable '.[dev,dev-kubernetes]'
	@touch $(RUNTIME) $@
