# make quickstart | test | check | bench
# An environment that already has torch and the rest is used as it is with:  make test PYTHON=python3 VENV=
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2
ARGS ?=

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.usp-ready
endif

.PHONY: quickstart test check bench clean
.DEFAULT_GOAL := test

quickstart: $(READY)
	$(PY) -m usp.tools.quickstart $(ARGS)

test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile -q $(ARGS)

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(PY) -m mypy

bench: $(READY)
	$(PY) -m usp.tools.cli bench $(ARGS)

# torch first, in its tested version: the rest then finds its requirement met and does not choose another build.
$(VENV)/.usp-ready: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit(v < (3, 11) and f"PYTHON=$(PYTHON) must be Python 3.11 or newer, got {v[0]}.{v[1]}. Try: make PYTHON=python3.12")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	DS_BUILD_OPS=0 $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[deepspeed]'
	@touch $@

clean:
	rm -rf build dist *.egg-info runs
