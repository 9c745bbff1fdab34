# Two commands matter: `make serve` and `make test`. Both set up .venv first, which takes no time when nothing has changed.
# Pass further flags with ARGS, for example: make serve ARGS="--port 30001", make test ARGS="tests/unit -x".
PY := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install serve test test-long test-gpu lint types imports clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## create .venv with the pinned packages and the demo model
	@scripts/install.sh

# exec: the server is make's own child, so a signal reaches it without a shell in between.
serve: install ## serve the demo model on 127.0.0.1:30000 (ARGS: more flags)
	@exec .venv/bin/hicache serve --config configs/cpu-demo.yaml $(ARGS)

test: install ## run the default test suite (ARGS: more pytest arguments)
	@$(PY) -m pytest -m "not long" $(ARGS)

test-long: install ## run the tests that take minutes to hours
	@$(PY) -m pytest -m "long and not gpu" $(ARGS)

# On a machine without a network: make test-gpu PY=python3 BUNDLE=FOLDER, with the folder that scripts/gpu_bundle.sh makes.
OUT ?= gpu-report
test-gpu: $(if $(filter .venv/%,$(PY)),install) ## run all that needs an NVIDIA GPU: tests and measurements, as a table in OUT
	@$(PY) -m benchmarks.gpu --out $(OUT) $(if $(BUNDLE),--bundle $(BUNDLE)) $(ARGS)

lint: install ## check style and formatting with ruff
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

types: install ## check types with mypy --strict
	@.venv/bin/mypy
	@.venv/bin/mypy scripts/*.py
	@.venv/bin/mypy benchmarks/gpu/*.py

imports: install ## check who may import whom
	@.venv/bin/lint-imports --no-logo

clean: ## remove everything these targets made, .venv included; stored pages stay
	rm -rf .venv build *.egg-info hicache/transfer/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
