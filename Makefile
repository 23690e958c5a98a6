# make test PYTHON=python3.12 uses that interpreter's environment; without PYTHON there is a .venv.
PYTHON ?=
VENV := .venv
RUN := $(if $(PYTHON),$(PYTHON),$(VENV)/bin/python)
FUZZ_ARGS ?= --time 60s
KILLS ?= 100
SOAK_ARGS ?= --max-cases 100000 --time 24h
TEST_ARGS ?= -n auto
SURVIVED = --survived tests/survived_mutants.json
MUTANT_ARGS ?= --json .pagefault/mutants.json --markdown docs/mutants.md $(SURVIVED)
LISTED_ARGS ?= --listed --cases 20000 $(SURVIVED)
RECORD_ARGS ?=
BENCH_ARGS ?= --markdown docs/kernels.md --plot docs/kernels.svg

.PHONY: help setup test-setup lint-setup test test-slow test-kills fuzz soak mutants mutants-listed \
	lint format bench bench-finding bench-record bench-kernels peers clean

help:
	@echo "make fuzz    set up, then fuzz our kernels for a minute (FUZZ_ARGS='--time 10m')"
	@echo "make soak    the same for 100,000 cases, every check on; void unless all is reached (SOAK_ARGS)"
	@echo "make test    set up, then run the tests (TEST_ARGS='-n 4 tests/oracle')"
	@echo "make test-slow    the tests that make test leaves out, which take long"
	@echo "make test-kills   kill a campaign a hundred times and resume it (KILLS=10)"
	@echo "make mutants change our kernels one step at a time: what is found? (MUTANT_ARGS='--every 20')"
	@echo "make mutants-listed    hours: those listed as equivalent, until each has survived 20,000 cases;"
	@echo "             ended by Ctrl-C, it goes on where it was"
	@echo "make lint    ruff and mypy"
	@echo "make bench   where the time of a case goes"
	@echo "make bench-finding   how soon planted faults are found, against two other ways to draw cases"
	@echo "make bench-record    what pagefault.record costs the engine around it (RECORD_ARGS='--calls 50')"
	@echo "make bench-kernels   how fast the kernels are, on a GPU (BENCH_ARGS='--only ragged')"
	@echo "make peers   fetch the kernels of other engines, for --target tokenspeed"
	@echo "PYTHON=...   use that interpreter's environment instead of .venv"

setup:
ifeq ($(PYTHON),)
	@test -x $(VENV)/bin/python || python3 -m venv $(VENV)
endif
	@$(RUN) scripts/install.py

test-setup: setup
	@$(RUN) scripts/install.py test

lint-setup: setup
	@$(RUN) scripts/install.py lint

test: test-setup
	$(RUN) -m pytest $(TEST_ARGS)

test-slow: test-setup
	@$(RUN) scripts/install.py ray
	$(RUN) -m pytest $(TEST_ARGS) -m slow

test-kills: test-setup
	PAGEFAULT_TEST_KILLS=$(KILLS) $(RUN) -m pytest -n 0 -m slow tests/engine/test_campaign.py -k killed_again

fuzz: setup
	$(RUN) -m pagefault fuzz $(FUZZ_ARGS)

soak: setup
	$(RUN) -m pagefault fuzz --soak --strict $(SOAK_ARGS)

mutants: setup
	@mkdir -p .pagefault
	$(RUN) -m pagefault mutate --strict $(MUTANT_ARGS)

mutants-listed: setup
	$(RUN) -m pagefault mutate --strict $(LISTED_ARGS)

lint: lint-setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: lint-setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: setup
	$(RUN) benchmarks/bench_engine.py

bench-finding: setup
	$(RUN) benchmarks/bench_finding.py --markdown docs/finding.md

bench-record: setup
	$(RUN) benchmarks/bench_record.py $(RECORD_ARGS)

bench-kernels: setup
	$(RUN) benchmarks/bench_kernels.py $(BENCH_ARGS)

peers: setup
	$(RUN) scripts/peers.py

clean:
	rm -rf $(VENV) .peers .pagefault build dist
