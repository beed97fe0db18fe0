# `make demo` and `make test` include their setup; `make help` lists all targets.
PYTHON ?= python3
PORT ?= 8000
PACK ?= catan
py = .venv/bin/python
manage = $(py) manage.py

.DEFAULT_GOAL := help
.PHONY: help demo run t test test-all bench chaos simulate remote-suites kind-test lint format install image lock schema

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

demo: install image ## play a game with agents in leased sandboxes, until Ctrl-C: make demo, make demo PACK=rpg or coding
	@$(manage) migrate --verbosity 0
	@$(manage) quickstart
	@exec $(manage) demo --pack $(PACK) --port $(PORT)

run: install ## run the control plane without the game
	@exec $(manage) up --initialize --port $(PORT) --leave-nothing

t: install ## run the tests that need no service, on SQLite: make t ARGS="-k name"
	@.ci/quick $(ARGS)

test: install ## run the fast lanes, each test on the database that it needs: make test ARGS=tests/docker/test_sealed.py
	@.ci/services run postgres -- $(py) -m tests.lanes fast $(ARGS)

test-all: install ## run the whole matrix, an hour or more: make test-all ARGS="daytona kubernetes", ARGS=--resume
	@.ci/services run postgres -- $(py) -m tests.lanes all $(ARGS)

bench: install ## measure against the raw operations: make bench ARGS="density", ARGS=--all
	@.ci/services run postgres docker stores litellm -- $(py) -m tests.bench $(ARGS)

chaos: install ## run the load with random kills for 20 minutes (root, Docker, PostgreSQL): make chaos ARGS="--minutes 5"
	@$(py) -m tests.load $(ARGS)

simulate: install ## search seeds of the simulation on all cores until Ctrl-C: make simulate ARGS="--seeds 1000 --seed 1"
	@$(py) -m tests.simulation --seeds 0 --seed $$(date +%s) --jobs $$(nproc) $(ARGS)

remote-suites: install ## run the crash, race and simulation suites on an emulator (root): make remote-suites PROVIDER=kubernetes SEEDS=5
	@.ci/remote-suites $(PROVIDER) $(SEEDS)

kind-test: install ## run the tests of the Kubernetes provider on the cluster of KUBECONFIG, see docs/kubernetes.md
	@.ci/kind-test $(ARGS)

lint: install ## run ruff, mypy, the import contracts and the rules of migrations
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-logo
	@.venv/bin/python .ci/language
	@$(py) -m tests.lint

format: install ## fix and format with ruff
	@.venv/bin/ruff check --fix-only --quiet .
	@.venv/bin/ruff format --quiet .

image: install ## build the sandbox image, if a Docker daemon responds
	@.ci/image

schema: install ## regenerate controlplane/openapi.yaml and the types of the Python client
	@$(manage) spectacular --validate --fail-on-warn --file controlplane/openapi.yaml
	@$(py) .ci/client-schemas

lock: ## update the pinned dependencies (needs uv)
	@.ci/lock

install: .venv/installed .env

.venv/installed: requirements.lock
	@PYTHON=$(PYTHON) .ci/install

.env:
	@umask 077; printf 'DEBUG=1\nSECRET_KEY=%s\n' "$$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')" > .env
	@echo "Wrote .env: DEBUG=1 and a new SECRET_KEY, for this machine only."
