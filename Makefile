# make demo and make test do all of their set-up; `make help` lists the rest.
PYTHON ?= python3
PORT ?= 8000
py = .venv/bin/python
manage = $(py) manage.py

.DEFAULT_GOAL := help
.PHONY: help demo run t test bench lint format install image lock schema

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

demo: install image ## agents play a real game in leased sandboxes; the server stays up until Ctrl-C
	@$(manage) migrate --verbosity 0
	@$(manage) quickstart
	@exec $(manage) demo --port $(PORT)

run: install image ## the control plane without the game
	@$(manage) migrate --verbosity 0
	@$(manage) quickstart
	@exec $(manage) up --port $(PORT) --leave-nothing

t: install ## tests that need no service, on SQLite: make t ARGS="-k name"
	@.ci/quick $(ARGS)

test: install ## every test, on SQLite and PostgreSQL, with a real Docker Engine where one can be had
	@.ci/services run .ci/test $(ARGS)

bench: install ## ratios of ours to the raw operation, side by side
	@.ci/services run $(py) -m tests.bench

lint: install ## ruff, mypy, the import contract
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-logo

format: install ## let ruff rewrite what it can
	@.venv/bin/ruff check --fix-only --quiet .
	@.venv/bin/ruff format --quiet .

image: install ## the sandbox image, if a Docker daemon answers
	@.ci/image

schema: install ## write controlplane/openapi.yaml anew
	@$(manage) spectacular --validate --fail-on-warn --file controlplane/openapi.yaml

lock: ## pin every dependency anew (needs uv)
	@.ci/lock

install: .venv/installed .env

.venv/installed: requirements.lock
	@PYTHON=$(PYTHON) .ci/install

.env:
	@printf 'DEBUG=1\nSECRET_KEY=%s\n' "$$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')" > .env
	@echo "Wrote .env: DEBUG=1 and a new SECRET_KEY, for this machine only."
