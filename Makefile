# One verb each. `make setup` makes .venv with everything installed; the other verbs call it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
NATIVE := $(shell find native -name "*.cpp" -o -name "*.h" -o -name CMakeLists.txt)
MODEL ?= demo
PORT ?= 8000
ARGS ?=
MINUTES ?= 5
SECONDS ?= 60
# make passes a shell's Ctrl-C on to its children; it must not add an error line of its own.
DATA ?= ../shared/data
.PHONY: setup serve chat test check test-native bench soak trace clients schema-test fuzz clean
.PHONY: ring kills maskbench schema-samples bfcl structured

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "evensong needs Python 3.11 or newer; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/evensong serve $(MODEL) --port $(PORT) $(ARGS)

chat: $(STAMP)
	@exec $(BIN)/evensong chat --url http://127.0.0.1:$(PORT)/v1 $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

test: check
	$(BIN)/pytest $(ARGS)

# The kernels' tests once more, on a build with bounds checks and the address and undefined-behaviour sanitizers.
test-native: $(STAMP)
	$(BIN)/python -m tests.native_run $(ARGS)

# Peers where their flags or variables say where they are (docs/benchmarking.md); ARGS='--quick'
bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(ARGS)

# Needs vLLM's environment: EVENSONG_PEER_VLLM, or ARGS='--peer-python PATH'
.PHONY: engine-cost
engine-cost: $(STAMP)
	$(BIN)/python benchmarks/engine_cost.py $(ARGS)

soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --report soak-report.json $(ARGS)

# Replays a trace with the prefix cache on and off; ARGS='--trace FILE --time-scale 2'
trace: $(STAMP)
	$(BIN)/python benchmarks/trace_replay.py --report trace-report.json $(ARGS)

# A plan out to two ranks and tokens back, 100,000 times; and 50 workers killed at random moments; ARGS='-- -tp 2'
ring: $(STAMP)
	$(BIN)/python benchmarks/ring.py --report ring-report.json $(ARGS)

kills: $(STAMP)
	$(BIN)/python benchmarks/worker_kills.py --report worker-kills-report.json $(ARGS)

# An environment for each under build/clients; ARGS='--only openai,llm'
clients: $(STAMP)
	$(BIN)/python benchmarks/clients.py --report clients-report.json $(ARGS)

schema-test: $(STAMP)
	$(BIN)/python -m tests.server.schema_run schema-report.json $(ARGS)

# Schemas with their instances, beside llguidance and xgrammar alone; ARGS='--every 10'
maskbench: $(STAMP)
	$(BIN)/python benchmarks/maskbench.py --data $(DATA)/jsonschema/maskbench --xgrammar-python $(BIN)/python --report maskbench-report.json $(ARGS)

# Three answers of the demo model for each schema of the JSON Schema test suite that is enforced; ARGS='--limit 20'
schema-samples: $(STAMP)
	$(BIN)/python benchmarks/schema_samples.py --data $(DATA)/jsonschema/JSON-Schema-Test-Suite --report schema-samples-report.json $(ARGS)

# Function calls that a tool_choice of required makes; ARGS='--limit 20'
bfcl: $(STAMP)
	$(BIN)/python benchmarks/bfcl.py --folder $(DATA)/bfcl --report bfcl-report.json $(ARGS)

# 32 constrained streams beside the same ones unconstrained
structured: $(STAMP)
	$(BIN)/python benchmarks/structured.py --report structured-report.json $(ARGS)

# The readers of weight files, SECONDS each; what crashes one lies in tests/fuzz/corpus then, for `make test` to replay
fuzz: $(STAMP)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt atheris
	$(BIN)/python -m tests.fuzz.fuzz_readers --seconds $(SECONDS) $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
