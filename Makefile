# Two commands do everything on a fresh Debian or Ubuntu machine, as root: `make demo` and `make test`.
SHELL := /bin/bash
PY := .venv/bin/python
BASETEMP := $(shell echo $${TMPDIR:-/tmp})/dsec-test-$(shell id -u)-$(shell echo $(CURDIR) | cksum | cut -d' ' -f1)

.PHONY: demo test setup lint bench clean proto

setup:
	.ci/setup

demo: setup
	.venv/bin/dsec demo

test: setup
	$(PY) -m pytest $(if $(PYTEST_CACHE),-o cache_dir=$(PYTEST_CACHE),-p no:cacheprovider) --basetemp=$(BASETEMP) $(PYTEST_ARGS)

lint: setup
	$(PY) -m pytest -p no:cacheprovider tests/repo

bench: setup
	$(PY) -m tests.bench.run

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis nomad_dsec/guest/bin demo-report

proto:
	cd plugins && ../$(PY) -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. dsec_plugins/proto/*.proto dsec_plugins/goplugin/wire.proto
