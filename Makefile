PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# One process per core, each with a Redis of its own; the tests of a file stay in one process.
PARALLEL = -n auto --maxprocesses 4 --dist loadfile

# $(call debian,curl): install the Debian package of a command, unless the command is there;
# $(call debian,mariadb,mariadb-client-core): packages of another name.
define debian
command -v $(1) >/dev/null 2>&1 || { \
	  command -v apt-get >/dev/null 2>&1 \
	    || { echo "There is no $(1) on PATH, and no apt-get to install it with: please install it." >&2; exit 1; }; \
	  echo "Installing $(1) ..."; \
	  if [ "$$(id -u)" != 0 ]; then sudo=sudo; else sudo=; fi; \
	  $$sudo apt-get update -q && $$sudo apt-get install -y -q --no-install-recommends $(or $(2),$(1)); \
	}
endef

.DEFAULT_GOAL := help
.PHONY: help install run test test-all browser lint format conformance servers cluster matrix coverage docs dist bench bench-quick instructions soak constraints clean

help: ## List what can be done
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# Installs an extra of the package in the versions of constraints.txt, with further options of pip.
define install
	@echo "Installing rlaas_django[$(1)] in $(VENV) ..."
	@if command -v uv >/dev/null 2>&1; then \
	  uv venv -q --seed --allow-existing --python "$$(command -v $(PYTHON))" $(VENV) \
	  && uv pip install $(2) --python $(BIN)/python -c constraints.txt -e '.[$(1)]'; \
	else \
	  $(PYTHON) -m venv $(VENV) \
	    || { echo "python -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }; \
	  $(BIN)/python -m pip install $(2) --disable-pip-version-check -c constraints.txt -e '.[$(1)]'; \
	fi
	@touch $@
endef

$(VENV)/.demo: pyproject.toml constraints.txt
	$(call install,demo)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,dev,-q)
	@touch $(VENV)/.demo

install: $(VENV)/.installed ## Make the environment

run: $(VENV)/.demo ## Run the demo, on port 8000 or PORT=...
	@PORT="$(PORT)" exec $(BIN)/python -m example_project

test: $(VENV)/.installed ## Run the tests of every behaviour, on a real server, within three minutes
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)

test-all: $(VENV)/.installed ## Add the long tier: faults, forks, Cluster, Sentinel, load, fuzz, every kind of view
	-@$(call debian,curl)
	-@$(call debian,mariadb-install-db,mariadb-server-core mariadb-client-core)
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

browser: $(VENV)/.installed ## Try the demo and the admin in a real Chromium
	@$(call debian,chromium)
	RLAAS_BROWSER=1 $(BIN)/python -m pytest tests/browser $(ARGS)

lint: $(VENV)/.installed ## Check style, types, layers and Lua
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy rlaas_django tests/typing
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/backend/test_scripts.py -k valid_lua

format: $(VENV)/.installed ## Mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

conformance: $(VENV)/.installed ## Run the own tests of django-ratelimit and Django REST framework on our adapters
	RLAAS_CONFORMANCE=1 $(BIN)/python -m pytest tests/integrations/test_conformance.py $(ARGS)

servers: $(VENV)/.installed ## Run the tests on the oldest and newest servers available
	$(BIN)/python -m tests.support.servers $(ARGS)

cluster: $(VENV)/.installed ## Run the tests of the core on a Redis Cluster
	$(BIN)/python -m tests.support.on_cluster $(ARGS)

matrix: $(VENV)/.installed ## Run the tests on each Python and Django available
	$(BIN)/python -m tests.support.matrix $(ARGS)

coverage: $(VENV)/.installed ## Measure which lines and branches of the package the tests run; at least 97 %
	rm -f .coverage*
	$(BIN)/python -m coverage run -m pytest -q $(PARALLEL) $(ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

docs: $(VENV)/.installed ## Build the documentation in site/; warnings are errors
	$(BIN)/sphinx-build -q -W --keep-going -b html docs site

dist: $(VENV)/.installed ## Build the wheel and the sdist, and check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

bench: ## Measure against peers, in an environment of its own; writes benchmarks/RESULTS.md
	$(PYTHON) -m benchmarks $(ARGS)

bench-quick: ## The same in under two minutes; writes nothing
	$(PYTHON) -m benchmarks --quick $(ARGS)

instructions: ## Count a decision's instructions with valgrind; ARGS="--against /path/to/another/checkout"
	$(PYTHON) -m benchmarks instructions $(ARGS)

soak: $(VENV)/.installed ## Decide for ten minutes on a server that fails; ARGS="--minutes 2 --seed 7"
	$(BIN)/python -m benchmarks soak $(ARGS)

constraints: ## Renew constraints.txt, the versions of the environment; needs uv
	uv pip compile --upgrade --universal --python-version 3.11 --all-extras --no-annotate \
	  --no-emit-index-url --no-emit-find-links --no-emit-package rlaas_django \
	  --custom-compile-command "make constraints" -o constraints.txt pyproject.toml

clean: ## Remove what was made here
	rm -rf $(VENV) .bench .tox .servers .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* htmlcov build dist site
