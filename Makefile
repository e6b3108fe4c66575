# Everything that a newcomer, a developer and CI run. `make` alone lists it.

PYTHON        ?= python3.11
# More options for pip, e.g. PIP_ARGS="--index-url https://my.mirror/simple"
PIP_ARGS      ?=
# More options for the demo runs, e.g. ARGS="--set steps=20"
ARGS          ?=
# More options for pytest, e.g. PYTEST_ARGS="-k queue -x"
PYTEST_ARGS   ?=
# Processes that share the tests, whole files at a time; WORKERS=0 runs them in one, as they come.
WORKERS       ?= 2

VENV          := .venv
SGLANG_VENV   := .venv-sglang
SGLANG_FILES  := relax_agent/engines/sglang_cpu
TYPING        := build/typing/relax_agent
# A peer is a library that an adapter is tested against: one pinned venv each, of the same name as
# its requirements file. `make peers PEERS=gem` builds one, `make test-peers PEERS=gem` tests one.
PEER_FILES    := tests/peers/requirements
PEERS         ?= $(filter-out %.no-deps,$(basename $(notdir $(wildcard $(PEER_FILES)/*.txt))))
RECIPE        := configs/calculator-moe.yaml
TRAIN         := $(VENV)/bin/relax-agent train $(RECIPE)
SGLANG        := --set engine.kind=sglang --set weights.kind=disk --set weights.pause=in_place
# A run that is over in minutes and has nothing to prove but that every part does its work.
SMOKE         := --set eval.tasks=32 --set goal.success_last=null --set goal.success_rise=null \
                 --set goal.greedy_rise=null \
                 --set trainer.warm_start.episodes=512 --set trainer.warm_start.steps=100

# One thread a process: a run has several processes that would otherwise fight for the cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv venv-sglang peers test-peers demo demo-sglang smoke smoke-sglang test test-sglang \
        lint format typing clean

help:  ## list what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

venv: $(VENV)/.stamp typing  ## create .venv with everything that training on a CPU needs

# torch comes through the constraints file: a loose one pulls gigabytes of CUDA with it.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@echo "installing into $(VENV): a few minutes, 2.5 GB"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[train,envs,media,mcp,dev]'
	@touch $@

venv-sglang: $(SGLANG_VENV)/.stamp  ## create .venv-sglang with real SGLang for a CPU

# SGLang's own list of dependencies wants CUDA; the two files name what a CPU needs.
$(SGLANG_VENV)/.stamp: constraints.txt $(wildcard $(SGLANG_FILES)/*.txt)
	@echo "installing into $(SGLANG_VENV): a few minutes, 3 GB"
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt \
	    -r $(SGLANG_FILES)/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install -q $(PIP_ARGS) --no-deps \
	    -r $(SGLANG_FILES)/requirements-no-deps.txt
	@touch $@

peers: build/peers/megatron-0.17.1/.stamp $(PEERS:%=build/peers/%/.stamp)  ## fetch the libraries that tests compare with

test-peers: $(PEERS:%=test-peers-%)  ## run each adapter's tests in the venv of its library

build/peers/megatron-0.17.1/.stamp: $(VENV)/.stamp
	$(VENV)/bin/python -m pip install -q $(PIP_ARGS) --no-deps --ignore-requires-python \
	    --upgrade --target $(@D) megatron-core==0.17.1
	@touch $@

# What a peer drags in and does not need stands in NAME.no-deps.txt, without its dependencies.
# The lock keeps `make -j` from building this package twice at the same time.
build/peers/%/.stamp: $(PEER_FILES)/%.txt $(PEER_FILES)/%.no-deps.txt build/peers/base.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q $(PIP_ARGS) \
	    -c constraints.txt -r build/peers/base.txt -r $<
	@! test -s $(word 2,$^) || $(@D)/bin/python -m pip install -q $(PIP_ARGS) \
	    --no-deps -r $(word 2,$^)
	@flock build/peers $(@D)/bin/python -m pip install -q $(PIP_ARGS) --no-deps -e .
	@touch $@

# Most peers need no such file.
$(PEER_FILES)/%.no-deps.txt: ;

# What this package needs itself, so that pip settles it together with what the peer needs.
build/peers/base.txt: pyproject.toml constraints.txt
	@mkdir -p $(@D)
	@$(PYTHON) -c 'import tomllib; \
	    print("pytest>=8", *tomllib.load(open("$<", "rb"))["project"]["dependencies"], sep="\n")' > $@

.PHONY: $(PEERS:%=test-peers-%)
$(PEERS:%=test-peers-%): test-peers-%: build/peers/%/.stamp
	$(<D)/bin/python -m pytest tests/peers/test_$(subst .,_,$(subst -,_,$*)).py $(PYTEST_ARGS)

demo: $(VENV)/.stamp  ## train a small mixture-of-experts model to use a calculator
	$(TRAIN) $(ARGS)

demo-sglang: $(VENV)/.stamp $(SGLANG_VENV)/.stamp  ## the same with real SGLang as the engine
	$(TRAIN) $(SGLANG) --set name=calculator-moe-sglang $(ARGS)

smoke: $(VENV)/.stamp  ## the demo's recipe for ten steps
	$(TRAIN) $(SMOKE) --set name=smoke --set steps=10 $(ARGS)

smoke-sglang: $(VENV)/.stamp $(SGLANG_VENV)/.stamp  ## the demo's recipe for five steps on real SGLang
	$(TRAIN) $(SMOKE) $(SGLANG) --set name=smoke-sglang --set steps=5 $(ARGS)

test: $(VENV)/.stamp build/peers/megatron-0.17.1/.stamp  ## run the tests that need neither SGLang nor a GPU
	$(VENV)/bin/python -m pytest -m "not sglang and not gpu" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-sglang: $(VENV)/.stamp $(SGLANG_VENV)/.stamp  ## run the tests that need real SGLang
	$(VENV)/bin/python -m pytest -m sglang $(PYTEST_ARGS)

lint: $(VENV)/.stamp typing  ## check style, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	MYPYPATH=build/typing $(VENV)/bin/mypy -p relax_agent

format: $(VENV)/.stamp  ## put the code into its format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Type checkers do not follow the mapping of the outer folders into the package: links do it.
typing:
	@rm -rf $(TYPING) && mkdir -p $(TYPING)
	@ln -s $(addprefix $(CURDIR)/,$(filter-out %/__pycache__,$(wildcard relax_agent/*))) $(TYPING)/
	@ln -s $(CURDIR)/envs $(CURDIR)/tools $(CURDIR)/trainers $(TYPING)/

clean:  ## remove what was built, downloaded packages and runs kept
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find relax_agent envs tools trainers tests -name __pycache__ -type d -prune -exec rm -rf {} +
