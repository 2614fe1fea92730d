# Everything sets itself up: a virtual environment in .venv, pinned dependencies, the native kernels.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
NATIVE := $(shell find src/laconic/kernels -name '*.cc' -o -name '*.h') CMakeLists.txt

# The ends of the range of torch in pyproject.toml.
LOWEST  := 2.9.0
HIGHEST := 2.15.0
TORCH   ?= $(LOWEST)
OTHER   := .venv-torch-$(TORCH)
SLICE   := tests/golden tests/unit/test_architecture.py tests/dist/test_fsdp.py tests/dist/test_fsdp_beside.py \
           tests/dist/test_hsdp.py tests/dist/test_ddp_replicas.py tests/dist/test_ddp_state.py

FLOWER  := .venv-federated
OTHERS  := .venv-integrations

# Images of containers often set this, and each of the hundred commands that tests start would compile laconic anew.
unexport PYTHONDONTWRITEBYTECODE

# Triton belongs to CUDA builds of torch; its wheel also compiles and interprets kernels without a GPU.
TRITON  ?= 3.7.1
KERNELS := .venv-triton-$(TRITON)

.PHONY: setup demo test test-fast test-main test-federated test-integrations test-torch test-triton \
        venv-federated venv-integrations venv-torch venv-triton check workflows bench soak nightly docs site \
        dist clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: setup  ## time to one accuracy over emulated 100 Mbit/s links: digits, 4 workers, dense, fp16, auto, stc
	$(BIN)/laconic demo

check: setup  ## linters, types, the workflows, and the limits on awkward phrases
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m tests.prose
	$(MAKE) --no-print-directory workflows

workflows: setup  ## the workflows of GitHub, which call targets of this file
	$(BIN)/actionlint

# Ranks wait for each other much of the time, so four workers keep two cores busy. Files run in their order.
# With more than one thread each, the workers would spin while they wait for a core.
WORKERS ?= 4
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
LEAN     := -q -m "not soak and not nightly"
FAST     := tests/laws tests/golden tests/unit/test_architecture.py

test-fast: setup  ## in 90 s: laws of codecs, feedback and the exchange in one process, and the architecture
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(LEAN) $(PARALLEL) $(FAST)

test: check  ## in 8 minutes: all that a change needs, with Flower and other trainers
	$(MAKE) --no-print-directory -j1 -k test-main test-federated test-integrations

test-main: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(LEAN) $(PARALLEL)

# Each of these environments gets its turn: side by side, commands that tests start ran out of time on two cores.
# Flower's pins contradict constraints.txt. Its tests need no kernels, so nothing is compiled again.
venv-federated: $(FLOWER)/.ready

$(FLOWER)/.ready: pyproject.toml constraints-federated.txt
	test -x $(FLOWER)/bin/python || $(PYTHON) -m venv $(FLOWER)
	PIP_CONSTRAINT=constraints-federated.txt $(FLOWER)/bin/pip install --quiet --config-settings=wheel.cmake=false \
	    --editable '.[federated]' pytest pytest-timeout
	touch $@

test-federated: venv-federated  ## the tests of federated training with Flower
	OMP_NUM_THREADS=1 $(FLOWER)/bin/python -m pytest $(LEAN) tests/flower

# The same holds for third-party trainers.
venv-integrations: $(OTHERS)/.ready

$(OTHERS)/.ready: pyproject.toml constraints-integrations.txt
	test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	PIP_CONSTRAINT=constraints-integrations.txt $(OTHERS)/bin/pip install --quiet --config-settings=wheel.cmake=false \
	    --editable '.[integrations]' pytest pytest-timeout
	touch $@

test-integrations: venv-integrations  ## the tests with Lightning, Accelerate, transformers and Ray Train
	OMP_NUM_THREADS=1 $(OTHERS)/bin/python -m pytest $(LEAN) tests/integrations

# PYTHON=python3.10 takes another Python too. The package is installed as users install it, and nothing is pinned.
venv-torch: $(OTHER)/.ready

$(OTHER)/.ready: pyproject.toml $(NATIVE) $(shell find src -name '*.py')
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet 'torch==$(TORCH)' '.[test]'
	touch $@

test-torch: venv-torch  ## a slice of the tests with another torch, in a venv of its own: TORCH=2.15.0
	$(OTHER)/bin/python -m pytest $(LEAN) $(SLICE)

# Triton is installed beside the packages of .venv, which a .pth file shares: torch is not installed twice.
venv-triton: $(KERNELS)/.ready

$(KERNELS)/.ready: $(STAMP)
	test -x $(KERNELS)/bin/python || $(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/pip install --quiet --no-deps 'triton==$(TRITON)'
	$(BIN)/python -c "import sysconfig; print('$(CURDIR)/src', sysconfig.get_path('purelib'), sep='\n')" \
	    > $$($(KERNELS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth
	touch $@

test-triton: venv-triton  ## Triton kernels against their references in its interpreter, and compiled for absent GPUs
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(KERNELS)/bin/python -m pytest -q tests/triton
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(KERNELS)/bin/python -m pytest -q tests/device/test_budgets.py
	$(KERNELS)/bin/python -m pytest -q tests/triton

# REPEATS=1 runs each repeated law once; in full they take a night. PART=3/64 runs every 64th test from the third on.
soak: setup  ## the repeated laws in full: crashes, Ctrl-C, fuzz with AddressSanitizer
	$(BIN)/python -m pytest -q -m soak $(if $(REPEATS),--repeats $(REPEATS)) $(if $(PART),--part $(PART))
	$(MAKE) venv-federated && $(FLOWER)/bin/python -m pytest -q -m soak tests/flower
	$(MAKE) venv-integrations && $(OTHERS)/bin/python -m pytest -q -m soak tests/integrations
	$(BIN)/python -m tests.native.fuzz --sanitize --count 1000000

# A different slice of the repeated laws each day.
DAY := $(shell expr $$(date +%j) % 64 + 1)
nightly: test  ## in some hours: full products, a slice of the repeated laws, Triton, both ends of torch's range, mutants
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --full -m "not soak" $(PARALLEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --full tests/device
	OMP_NUM_THREADS=1 $(OTHERS)/bin/python -m pytest -q -m nightly tests/integrations
	$(BIN)/python -m pytest -q -m soak --repeats 1 --part $(DAY)/64
	$(BIN)/python -m tests.native.fuzz --sanitize --count 100000
	$(MAKE) --no-print-directory test-triton
	$(MAKE) --no-print-directory test-torch TORCH=$(LOWEST)
	$(MAKE) --no-print-directory test-torch TORCH=$(HIGHEST)
	$(MAKE) --no-print-directory site
	$(MAKE) --no-print-directory dist
	$(BIN)/python -m tests.mutants

bench: setup  ## a short pass of many benchmarks, which writes nothing; without --quick they write their results
	$(BIN)/python -m benchmarks.kernels --quick
	$(BIN)/python -m benchmarks.quantisers --quick
	$(BIN)/python -m benchmarks.entropy --quick
	$(BIN)/python -m benchmarks.xnor --quick
	$(BIN)/python -m benchmarks.wire --quick
	$(BIN)/python -m benchmarks.steps --quick
	$(BIN)/python -m benchmarks.straggler --quick
	$(BIN)/python -m benchmarks.wan --quick
	$(BIN)/python -m benchmarks.scaling --quick
	$(BIN)/python -m benchmarks.through_servers --quick
	$(BIN)/python -m benchmarks.accuracy --quick
	$(BIN)/python -m benchmarks.large_batch --quick
	$(BIN)/python -m benchmarks.augmentation --quick
	$(BIN)/python -m benchmarks.outer --quick
	$(BIN)/python -m benchmarks.outer.inside --quick
	$(BIN)/python -m benchmarks.replicator --quick

docs: setup  ## the tables that tests generate, and the site
	$(BIN)/python -m tests.dist.composition_page > docs/composition.md.new && mv docs/composition.md.new docs/composition.md
	$(BIN)/python -m benchmarks.pages.write
	$(MAKE) site

site: setup  ## the pages as a site, in build/site: open index.html
	$(BIN)/python -m mkdocs build --strict --quiet

dist:  ## sdist and wheels in dist/, each tried in an empty environment; ONLY=3.12 builds one wheel
	$(PYTHON) -m tests.wheels $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf $(VENV) $(FLOWER) $(OTHERS) .venv-torch-* .venv-triton-* build dist runs .mypy_cache .ruff_cache .pytest_cache
