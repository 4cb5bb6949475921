# Two commands: `make lab` and `make test`. Both need only Python and make; .venv is made for them.
# Options go through:  make lab ARGS="--port 9999"   make test ARGS="tests/test_doctor.py -x"

PYTHON ?= python3
ARGS ?=
THOROUGH ?=
VENV := .venv
RUN := $(VENV)/bin/python

# A Python that was named on purpose decides; otherwise a .venv that works is kept as it is.
NAMED := $(if $(filter file,$(origin PYTHON)),,--this-python)
SETUP = @command -v $(PYTHON) >/dev/null || \
	{ echo "set-up: there is no $(PYTHON) here. Install Python 3.11 or newer (Debian, Ubuntu: sudo apt install python3 python3-venv)." >&2; exit 1; }; \
	$(PYTHON) tools/setup_env.py --venv $(VENV) --target $@ $(NAMED)

.DEFAULT_GOAL := help
.PHONY: help lab test lint clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo '  options:      ARGS="..." is passed on; PYTHON=python3.13 names another Python'

lab: ## set up, check this machine, open JupyterLab at the first lesson
	$(SETUP) --extra test
	@$(RUN) -m flashcourse doctor
	@exec $(RUN) -m flashcourse open $(ARGS)

test: ## set up and run the tests; THOROUGH=1 adds the long ones: an hour or more
	$(SETUP) --extra test
	@FLASHCOURSE_THOROUGH=$(THOROUGH) $(RUN) -m pytest $(ARGS)

lint: ## check style and types
	$(SETUP) --extra test
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

clean: ## remove .venv and everything else that is made, not written
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
