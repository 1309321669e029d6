# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv beside this file first.
#
#   TORCH    what pip installs for torch; the default needs no GPU. A GPU user's own torch: `make test TORCH=` with PYTHON
#            set to the interpreter that has it; .venv then sees that interpreter's packages.
#   PYTHON   the interpreter that makes .venv (3.11 or newer)
PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE := $(if $(strip $(TORCH)),,--system-site-packages)
DEMO := demo
CHECKPOINT := $(DEMO)/checkpoint

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test test-ranks coverage lint keys results formats docs clean

$(STAMP): pyproject.toml $(wildcard planner/contract/experts/policies/*.c runtime/*/native/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv $(SITE) $(VENV)
	printf '%s\n' $(TORCH) > $(VENV)/constraints.txt
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install --disable-pip-version-check -q "$(TORCH)")
	$(BIN)/python -m pip install --disable-pip-version-check -q -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@

# `hardware=demo` is found in ./demo, so the demo leaves the user's own profile alone.
demo: export PENSTOCK_CONFIG_DIR := $(CURDIR)/$(DEMO)
demo: $(STAMP)
	mkdir -p $(DEMO)
	planner probe probe.quick=true probe.force=true probe.name=demo probe.path=$(DEMO)
	test -d $(CHECKPOINT) || runtime synth model=demo out=$(CHECKPOINT)
	weights=$$(du -bc $(CHECKPOINT)/*.safetensors | tail -n 1 | cut -f 1) && set -x && \
	planner solve hardware=demo model=hf model.checkpoint=$(CHECKPOINT) hardware.dram_bytes=$$((weights * 40 / 100)) \
	    workload.prompt_tokens=128 workload.new_tokens=16 workload.context_tokens=0 out=$(DEMO)/plan.yaml
	runtime run plan=$(DEMO)/plan.yaml validate=full out=$(DEMO)/run.json

test: $(STAMP)
	pytest -q -n 2 --dist loadfile

# Texts and logits over two and three ranks, in all cases.
test-ranks: $(STAMP)
	PENSTOCK_RANKS=all pytest -q tests/runtime/ranks

# Which lines and branches no test takes, processes that tests start counted. The page is in htmlcov/.
coverage: $(STAMP)
	coverage erase
	coverage run -m pytest -q -n 2 --dist loadfile
	coverage combine -q
	coverage html -q
	coverage report

lint: $(STAMP)
	ruff check .
	ruff format --check .
	mypy

# The reference of every key, from the schemas.
keys: $(STAMP)
	PYTHONPATH=$(CURDIR) python docs/keys_page.py > docs/keys.md

# The page of measured figures, from bench/results/.
results: $(STAMP)
	PYTHONPATH=$(CURDIR) python docs/results_page.py > docs/results.md

# The table of formats, in docs/formats.md and README.md: plans of preset machines, and results.
formats: $(STAMP)
	PYTHONPATH=$(CURDIR) python docs/formats_table.py

# The pages as a site that can be searched, in site/; a link that leads nowhere ends it.
docs: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c $(VENV)/constraints.txt -e '.[docs]'
	mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:
	rm -rf $(DEMO) $(VENV) build dist site *.egg-info
