# `make demo` and `make test` do all set-up on a fresh machine. Every install goes through constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
BORDER := .border
DOCS := .docs
PART ?= 1
# Processes of the test suite. Each takes whole files, so that what a file shares is made once.
WORKERS ?= 2
# instafail: a failure is told when it happens, also where the run is ended before its summary.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --instafail
MINUTES ?= 5
# What runs on the GPU: the peers' environment, else Kielo's own, else (a machine that can install nothing) the python there.
GPU_PYTHON ?= $(firstword $(wildcard $(PEERS)/bin/python $(BIN)/python) $(PYTHON))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A person's or a site's own settings of pip would put packages elsewhere than into the environments here.
export PIP_USER := 0
unexport PIP_TARGET PIP_PREFIX
# Where it is set, each process that a test starts would compile Kielo anew.
unexport PYTHONDONTWRITEBYTECODE

# Other versions of torch, each with the torchao that goes with it: 6.8 and 4.5 GB. Folders elsewhere: TORCH_210=, TORCH_211=
TORCH_210 ?= .torch/2.10
TORCH_211 ?= .torch/2.11

.PHONY: help demo test test-faults test-full test-demos test-slurm test-slurm-short test-torches test-border border-peers mutants soak lint types format lock bench-peers bench-gpu gpu-code gpu-wheels docs dist clean

help:
	@echo "Times are of two quiet cores, after the install (2 minutes at the first call; a GPU for bench-gpu)."
	@echo "make demo                4 min  real Estonian text to a verified, publishable model"
	@echo "make test                8 min  the test suite, in WORKERS=$(WORKERS) processes"
	@echo "make test-faults         7 min  odd inputs, faults and careless uses: nothing is lost, nothing is silent"
	@echo "make test-full         60 min   test, test-faults, the cases marked full but for compiled layers (test-torches) and demos"
	@echo "make test-demos        15 min   the demos in full: each model is better than its baselines"
	@echo "make mutants            1 hour  changes the source in small ways and counts how many changes a test notices"
	@echo "make lint                1 min  ruff, phrases, the stairs of imports, types, the Containerfile"
	@echo "make types               1 min  mypy over the package; 10 s when little has changed"
	@echo "make format                5 s  the source in the form that lint asks for"
	@echo "make lock                  5 s  writes constraints.lock: each package of this environment with its version"
	@echo "make soak MINUTES=5      8 min  8 ranks, a random fault each minute, and the end of an undisturbed run"
	@echo "make test-slurm-short    3 min  jobs on a real Slurm of four nodes here (root; apt-get install slurm-wlm munge)"
	@echo "make test-slurm          8 min  all of them, and a Grid Engine (gridengine-master gridengine-exec gridengine-client openmpi-bin)"
	@echo "make test-torches       45 min  what depends on torch, with 2.10, 2.11 and the pinned version (downloads 11 GB)"
	@echo "make test-border         5 min  what Kielo exports, in transformers 4, lm-eval, TRL, sentence-transformers"
	@echo "make bench-peers         5 min  installs the engines that benchmarks/training/step.py compares with"
	@echo "make bench-gpu PART=1    9 min  each bar that needs a GPU, in parts 1 to 7; 5 to 7 need other engines too"
	@echo "make gpu-code             3 min  kernels, launches and bytes of layers compiled for GPUs that need not be here"
	@echo "make gpu-wheels          20 s  packages that a GPU machine without network lacks, in .wheels/"
	@echo "make docs                 10 s  the pages of docs/ as a site, in site/; a dead link is an error"
	@echo "make dist                 30 s  the sdist and the wheel (with the site), checked, in dist/"
	@echo "make clean                      removes the virtual environments, runs and builds"

$(VENV)/.train: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Kielo needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo 'No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv'; exit 1; }
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[train]'
	touch $@

$(VENV)/.test: $(VENV)/.train
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[train,test]'
	touch $@

demo: $(VENV)/.train
	$(BIN)/python -m kielo run demo_estonian $(DEMO_OPTIONS)

test: $(VENV)/.test
	$(PYTEST) -m 'not full' --ignore=tests/faults --timeout 300 $(PYTEST_OPTIONS)

# Its cases often wait: for a hang to be one, or for ranks to end.
test-faults: WORKERS = 3
test-faults: $(VENV)/.test
	$(PYTEST) tests/faults -m 'not full' --timeout 300 $(PYTEST_OPTIONS)

test-full: $(VENV)/.test
	$(BIN)/python benchmarks/suite/full_tests.py

test-demos: $(VENV)/.test
	$(PYTEST) tests/demos $(PYTEST_OPTIONS)

test-slurm: $(VENV)/.test
	KIELO_TEST_SLURM=1 $(BIN)/python -m pytest tests/slurm tests/launch/test_network_plugin.py tests/launch/test_job_paths.py -rs --timeout 3600 $(PYTEST_OPTIONS)

test-slurm-short: $(VENV)/.test
	KIELO_TEST_SLURM=1 $(BIN)/python -m pytest tests/slurm -m 'not full' -rs --timeout 1800 $(PYTEST_OPTIONS)

# Without constraints.txt, which pins another torch.
.torch/2.10:
	$(BIN)/python -m pip install -q --target $@ --no-cache-dir --no-compile torch==2.10.0 torchao==0.16.0 || { rm -rf $@; exit 1; }

.torch/2.11:
	$(BIN)/python -m pip install -q --target $@ --no-cache-dir --no-compile torch==2.11.0 torchao==0.17.0 || { rm -rf $@; exit 1; }

# The versions run side by side, as many at once as there are cores.
test-torches: $(VENV)/.test $(TORCH_210) $(TORCH_211)
	$(BIN)/python benchmarks/suite/torches.py $(abspath $(TORCH_210)) $(abspath $(TORCH_211)) ''

mutants: $(VENV)/.test
	$(BIN)/python benchmarks/suite/mutants.py $(MUTANTS_OPTIONS)

soak: $(VENV)/.train
	$(BIN)/python benchmarks/faults/soak.py --minutes $(MINUTES) $(SOAK_OPTIONS)

lint: $(VENV)/.test
	$(BIN)/python -m ruff check src tests benchmarks docs
	$(BIN)/python -m ruff format --check -q src tests benchmarks docs
	$(BIN)/python docs/phrases.py
	$(BIN)/lint-imports
	$(BIN)/python -m mypy
	$(BIN)/hadolint Containerfile

types: $(VENV)/.test
	$(BIN)/python -m mypy

format: $(VENV)/.test
	$(BIN)/python -m ruff check -q --fix src tests benchmarks docs
	$(BIN)/python -m ruff format -q src tests benchmarks docs

# What a fresh machine gets today. Kielo's own ranges are in pyproject.toml; constraints.txt has the pins that every install needs.
lock: $(VENV)/.test
	{ echo "# Written by make lock: pip install -c constraints.lock -e '.[train,test]' gives this environment again."; \
		$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.lock

# Peers want other versions of what Kielo uses, so they live apart.
$(PEERS)/.peers: pyproject.toml constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q -c constraints.txt -e '.[train,fp8,test,peers]'
	$(PEERS)/bin/python -m pip install -q --no-deps 'litgpt>=0.5.13'
	touch $@

bench-peers: $(PEERS)/.peers

# Other people's programs, on the torch and the transformers of $(VENV), and an older transformers beside it.
$(BORDER)/.peers: $(VENV)/.test
	$(BIN)/python -m pip install -q --target $(BORDER)/transformers4 --no-deps transformers==4.57.6 huggingface_hub==0.36.0 tokenizers==0.22.1
	$(BIN)/python -m venv $(BORDER)/programs
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(BORDER)/programs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kielo.pth"
	$(BORDER)/programs/bin/python -m pip install -q -c constraints.txt lm-eval peft sentence-transformers trl
	touch $@

border-peers: $(BORDER)/.peers

# A program that is missing is an error here.
test-border: $(BORDER)/.peers
	KIELO_TEST_BORDER=$(BORDER) $(PYTEST) tests/border tests/models/test_ltg_bert_export.py --timeout 600 $(PYTEST_OPTIONS)

bench-gpu:
	$(GPU_PYTHON) benchmarks/training/gpu.py --part $(PART) $(BENCH_OPTIONS)

.triton:
	$(BIN)/python -m pip install -q --target $@ --no-deps --no-cache-dir triton==3.9.0 || { rm -rf $@; exit 1; }

gpu-code: $(VENV)/.test .triton
	PYTHONPATH=.triton TRITON_DEFAULT_FP_FUSION=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/training/gpu_code.py $(BENCH_OPTIONS)

gpu-wheels:
	$(PYTHON) benchmarks/training/gpu.py --fetch-wheels .wheels

# The packages of the extra alone: a site needs nothing of Kielo's own.
$(DOCS)/.docs: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS)/packages.txt
	$(DOCS)/bin/python -m pip install -q -c constraints.txt -r $(DOCS)/packages.txt
	touch $@

docs: $(DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build

dist: docs
	.ci/dist $(DOCS)/bin/python

clean:
	rm -rf $(VENV) $(PEERS) $(BORDER) $(DOCS) .torch .triton .wheels runs build dist site src/*.egg-info
