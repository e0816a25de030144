# Each target sets up what it needs in .venv, with pip; no environment has to be active, and an active one is left alone.
# Another interpreter: make PYTHON=/path/to/python3.12 demo

.DEFAULT_GOAL := help
PYTHON := python3.11 python3
BIN := .venv/bin
# Touched when the installation is complete: an interrupted one is done again, a finished one only when its inputs change.
INSTALLED := .venv/.installed

$(INSTALLED): pyproject.toml constraints.txt
	@python=; for candidate in $(PYTHON); do \
	    "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && python=$$candidate && break; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "Python 3.10 or newer is needed, and none of these is one: $(PYTHON). Install it (Debian, Ubuntu: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3 ..." >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "$$python cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python$$version-venv)." >&2; exit 1; \
	fi; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear .venv
	@echo "Installing into .venv (a few minutes the first time, most of it PyTorch) ..."
	@# -qq: errors only. PEP 517 builds DeepSpeed, which comes as source, the same way under old and new versions of pip.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --use-pep517 -c constraints.txt -e ".[dev,interop,plot,tensorboard,dashboard]"
	@touch $@

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

.PHONY: install
install: $(INSTALLED)  ## set up .venv and nothing else

.PHONY: demo
# A model this small gains nothing from more threads, and on a busy machine they wait for each other for minutes.
demo: export OMP_NUM_THREADS = 1
demo: $(INSTALLED)  ## write the embedded example to runs/demo, train on it and rewrite its base model
	$(BIN)/python -m gradiend_dist.demo runs/demo
	@# --quiet: a failed run ends with its own message, not with a second traceback of the launcher.
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/single.yaml -m gradiend_dist.train --config runs/demo/run.yaml
	$(BIN)/gradiend-dist evaluate runs/demo/results_masked

.PHONY: test
test: lint pytest  ## linter, types and the default test suite; under ten minutes on two cores

.PHONY: check
check: format-check lint pytest  ## what a change must pass: formatting, linter, types and the default test suite

.PHONY: format-check
format-check: $(INSTALLED)
	$(BIN)/ruff format --check .

.PHONY: lint
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: pytest
pytest: $(INSTALLED)
	@# Two workers on two cores: one launches ranks, the other does all else. A result depends on neither; -n 0 is one.
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

.PHONY: test-slow
test-slow: $(INSTALLED)  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

.PHONY: test-chaos
test-chaos: $(INSTALLED)  ## signals at random times and damaged files; half an hour. CHAOS_SEED=N for other times
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/driver.py --seed $${CHAOS_SEED:-0} --tries 100
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/driver.py --seed $${CHAOS_SEED:-0} --tries 12 --real
	$(BIN)/python -m pytest -m slow tests/chaos/test_damaged_files.py

.PHONY: test-slurm
test-slurm: $(INSTALLED)  ## jobs on a real Slurm, which is installed (Debian, as root) and started for it; 15 minutes
	@if command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then bash tests/slurm/install.sh; \
	else echo "Slurm is not installed: tests/slurm/install.sh installs it, as root; without it the tests are skipped" >&2; fi
	$(BIN)/python -m pytest -m slurm tests/slurm

.PHONY: bench
bench: $(INSTALLED)  ## time and memory against the reference package; ten minutes of an idle machine
	$(BIN)/python benchmarks/vs_reference.py

.PHONY: bench-engines
bench-engines: $(INSTALLED)  ## step time, memory and bytes sent of every engine; ten minutes of an idle machine
	$(BIN)/python benchmarks/engines.py

.PHONY: bench-grid
bench-grid: $(INSTALLED)  ## the decoder grid against the reference package; eight minutes of an idle machine
	$(BIN)/python benchmarks/decoder_grid.py

.PHONY: bench-convergence
bench-convergence: $(INSTALLED)  ## the closed form against training from a random start; half an hour of an idle machine
	$(BIN)/python benchmarks/convergence.py

.PHONY: bench-effect
# More base models: make bench-effect MODELS="--causal DIR --masked DIR --corpus DIR"
bench-effect: $(INSTALLED)  ## what rewriting does at equal harm, against rivals; four minutes of an idle machine
	$(BIN)/python benchmarks/effect.py $(MODELS)

.PHONY: bench-tracking
bench-tracking: $(INSTALLED)  ## training speed while W&B answers, refuses, stalls or limits; five minutes of an idle machine
	$(BIN)/python benchmarks/tracking.py

.PHONY: gpu-smoke
gpu-smoke: $(INSTALLED)  ## what must hold on a machine with two or more GPUs; five minutes
	$(BIN)/python benchmarks/gpu_smoke.py

.PHONY: clean
clean:  ## remove .venv, runs/demo, builds and caches
	rm -rf .venv runs/demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
