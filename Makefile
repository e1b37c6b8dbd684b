# Every target creates .venv and installs what it needs; a second call starts at once. `make help` lists the targets.
#
#   PYTHON       the interpreter that makes .venv (3.10 or newer)
#   PROFILE      cpu (default) | replay | ...: how much a run does, see `workbook run --help`
#   OUT          where `make run` writes
#   TORCH_INDEX  where PyTorch comes from: auto | pypi | the address of an index of wheels. `auto` takes the CPU build
#                (about 200 MB) on a Linux machine without NVIDIA driver: from pip's own sources where they hold one,
#                else from PyTorch's index. Everywhere else it is `pypi` (on Linux the CUDA build, several GB).
PYTHON ?= python3
PROFILE ?= cpu
OUT ?= runs/$(PROFILE)
TORCH_INDEX ?= auto
EXTRAS ?= notebooks,test,metrics
PIP_ARGS ?= $(if $(CI),--quiet)
TEST_ARGS ?=
# how many processes run the tests, a file each at a time; the notebooks, which take longest, begin first
TEST_WORKERS ?= 2
LAB_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)
CPU_WHEELS := https://download.pytorch.org/whl/cpu
NEED_PYTHON = import sys; v = sys.version_info; v >= (3, 10) or sys.exit("error: $(PYTHON) is Python %d.%d; needed: \
3.10 or newer; do this: make PYTHON=python3.12 (or whichever newer one you have)" % v[:2])

.DEFAULT_GOAL := help
.PHONY: help install run test gpu-test lint lab format readme clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## */\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '  make %-8s %s\n' "$$name" "$$text"; done

install: $(INSTALLED)  ## create .venv and install the workbook into it

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) here; needed: Python 3.10 or newer" >&2; exit 1; }
	@$(PYTHON) -c '$(NEED_PYTHON)'
	$(PYTHON) -m venv $(VENV)
	@index='$(TORCH_INDEX)'; \
	if [ "$$index" = auto ]; then \
	  index=pypi; \
	  if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null \
	     && ! $(BIN)/pip index versions torch 2>/dev/null | grep -qF '$(TORCH)+cpu'; then index=$(CPU_WHEELS); fi; \
	fi; \
	if [ "$$index" != pypi ]; then \
	  echo "PyTorch $(TORCH) from $$index"; \
	  $(BIN)/pip install $(PIP_ARGS) --retries 1 --timeout 30 --no-deps --index-url "$$index" torch==$(TORCH) || { \
	    echo "error: no torch $(TORCH) from $$index; do this: see that it can be reached, name another with" \
	      "TORCH_INDEX=..., or take what pip finds, several GB, with TORCH_INDEX=pypi" >&2; exit 1; }; \
	fi
	$(BIN)/pip install $(PIP_ARGS) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

run: $(INSTALLED)  ## execute every notebook and write $(OUT)/report.html
	$(BIN)/workbook run --profile $(PROFILE) --out $(OUT)

test: $(INSTALLED)  ## run the tests (each with a time limit)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

gpu-test: $(INSTALLED)  ## run the tests that need an NVIDIA GPU (elsewhere each says why it is skipped)
	$(BIN)/python -m pytest -m gpu tests/gpu $(TEST_ARGS)

lint: $(INSTALLED)  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

lab: $(INSTALLED)  ## open the notebooks in JupyterLab, reachable from this machine only
	$(BIN)/jupyter lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS) notebooks/00_setup.ipynb

format: $(INSTALLED)  ## rewrite code and notebooks in their canonical form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tests/notebooks/canonical.py --write

readme: $(INSTALLED)  ## refill the README's results table from notebooks/recorded
	$(BIN)/python tests/readme_results.py --write

clean:  ## remove .venv, runs and caches
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache
