# Needs git, make, g++ and Python 3.10 or later with venv; everything else is installed into .venv.
#
#   make env      the environment              make check    linters and the fast tests
#   make demo     train on 2 NPUs              make test     linters and all tests
#   make bench    measure                      make clean    remove what make made
#   make exhaustive   linters and every case of every test, hours, in environments of other clients, too (make clients-env);
#                     with clones of DeepSpeed's repositories also theirs:
#                     make exhaustive DEEPSPEED_CHECKOUT=../DeepSpeed DEEPSPEED_EXAMPLES=../DeepSpeedExamples
#                     and with RUN_CLM=../transformers/examples/pytorch/language-modeling/run_clm.py Hugging Face's script
#
# PYTHON=python3.12 make env chooses the interpreter. Without NPUs in the machine, simulated ones take their place.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
TORCH := torch==2.13.0
DEEPSPEED := deepspeed==0.19.8
TORCH_NPU := torch_npu==2.13.0
STAMP := .venv/complete
CLIENTS := oldest llama_factory ms_swift
ON_NPUS := $(if $(wildcard /dev/davinci[0-9]*),,ds_npu sim --)
DEMO := examples/pretrain.py --deepspeed --deepspeed_config examples/configs/demo.json

# Without .venv/bin, for making it; DeepSpeed finds ninja and its launcher's ranks by PATH.
OUTER_PATH := $(PATH)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.torch_extensions
export OMP_NUM_THREADS ?= 1
# Another checkout on it would be tested in place of this one.
unexport PYTHONPATH
unexport PYTHONHOME

.PHONY: env clients-env demo check test exhaustive upstream bench clean lint fast whole raced unlock moved
.DEFAULT_GOAL := env

env: $(STAMP)

# The stamp holds this folder's name: an environment copied or moved from elsewhere is made anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): moved
endif

# Written last. Without it .venv was cut short (or copied) and is made anew; with an old one it is brought up to date.
$(STAMP): pyproject.toml setup.py Makefile
	@command -v g++ >/dev/null || { echo "make env: no C++ compiler: install g++" >&2; exit 1; }
	@if [ "$$(cat $@ 2>/dev/null)" != "$(CURDIR)" ]; then rm -rf .venv; fi; rm -f $@
	@if [ ! -d .venv ]; then \
		export PATH="$(OUTER_PATH)"; \
		command -v $(PYTHON) >/dev/null || { echo "make env: there is no $(PYTHON) on PATH; say PYTHON=..." >&2; exit 1; }; \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
			{ echo "make env: $$($(PYTHON) --version) is older than 3.10; say PYTHON=..." >&2; exit 1; }; \
		$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
			{ echo "make env: $(PYTHON) has no venv module; Debian and Ubuntu have it in python3-venv" >&2; exit 1; }; \
		$(PYTHON) -m venv .venv; \
	fi
	.venv/bin/python -m pip install --quiet $(TORCH)
	.venv/bin/python -m pip install --quiet $(TORCH) $(DEEPSPEED)
	.venv/bin/python -m pip install --quiet $(TORCH) $(DEEPSPEED) $(TORCH_NPU) --editable '.[examples,test]'
	@printf '%s' "$(CURDIR)" > $@

# Environments with the releases that other projects pin, for tests/clients; 4 GB. Only make exhaustive needs them.
clients-env: $(CLIENTS:%=.clients/%/complete)

.clients/%/complete: tests/clients/requirements/%.txt $(STAMP)
	rm -rf .clients/$*
	.venv/bin/python -m venv .clients/$*
	.clients/$*/bin/python -m pip install --quiet $(TORCH)
	.clients/$*/bin/python -m pip install --quiet $(TORCH) --requirement $< --editable .
	if [ -f $(<:.txt=-alone.txt) ]; then \
		.clients/$*/bin/python -m pip install --quiet --no-deps --requirement $(<:.txt=-alone.txt); \
	fi
	.clients/$*/bin/python -c 'import torch, ds_npu; print("$@:", ds_npu.__file__)'
	touch $@

# A build of a DeepSpeed extension that was killed leaves a lock behind, on which every later run waits for ever.
unlock:
	@mkdir -p $(TORCH_EXTENSIONS_DIR)
	@find $(TORCH_EXTENSIONS_DIR) -name lock -type f -delete

demo: $(STAMP) unlock
	$(ON_NPUS) deepspeed --num_gpus 2 $(DEMO)

check: lint fast

exhaustive: export EXHAUSTIVE := 1
exhaustive: export RUN_CLM := $(RUN_CLM)
exhaustive: lint clients-env whole raced upstream

test: lint whole

lint: $(STAMP)
	ruff check .
	ruff format --check .
	mypy
	lint-imports

fast: $(STAMP) unlock
	python -m pytest -m "not slow"

whole: $(STAMP) unlock
	python tests/support/parts.py env BUDGET=$${BUDGET:-140} $(ON_NPUS) python -m pytest tests/npu \
		--then env BUDGET=$${BUDGET:-400} python -m pytest

# Touches of the same memory that nothing orders, looked for in what tests/npu runs: of every test the drawn cases, in an
# exhaustive run, too: every case takes hours without the search.
raced: $(STAMP) unlock
	$(if $(ON_NPUS),EXHAUSTIVE= python tests/support/raced_suite.py,@echo "NOT RUN: races are found on simulated NPUs" >&2)

# DeepSpeed's own unit tests and examples. They are not part of this repository: what is not named is not run, and said.
upstream: $(STAMP) unlock
	@if [ -n "$(DEEPSPEED_CHECKOUT)" ]; then \
			python tests/support/deepspeed_unit_tests.py "$(DEEPSPEED_CHECKOUT)"; \
			python tests/support/deepspeed_unit_tests.py --section "$(DEEPSPEED_CHECKOUT)"; \
		else echo "NOT RUN: DeepSpeed's unit tests; name a clone: DEEPSPEED_CHECKOUT=..." >&2; fi
	@if [ -n "$(DEEPSPEED_EXAMPLES)" ]; then python tests/support/deepspeed_examples.py "$(DEEPSPEED_EXAMPLES)"; \
		else echo "NOT RUN: DeepSpeed's examples; name a clone: DEEPSPEED_EXAMPLES=..." >&2; fi
	@if [ -z "$(RUN_CLM)" ]; then echo "NOT RUN: Hugging Face's run_clm.py; name it: RUN_CLM=..." >&2; fi

bench: $(STAMP) unlock
	for script in benchmarks/*.py; do echo "== $$script"; python "$$script"; done

clean:
	rm -rf .venv .clients .torch_extensions build dist ds_npu.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
