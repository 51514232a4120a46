# Needs make and Python >= 3.11, nothing else. With another interpreter: make PYTHON=python3.12 demo
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo install test check clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/nagnet demo $(ARGS)

install: $(STAMP)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# PYRIGHT_PYTHON_IGNORE_WARNINGS: the version is pinned, so a newer one is no news.
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(BIN)/lint-imports

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an install that was cut short starts again.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "nagnet needs Python 3.11 or newer, and '$(PYTHON)' is not installed" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "nagnet needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1): try make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "'$(PYTHON)' cannot make virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
