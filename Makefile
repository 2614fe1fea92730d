# Everything sets itself up: a virtual environment in .venv, pinned dependencies, the native kernels.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
NATIVE := $(shell find src/laconic/kernels -name '*.cc' -o -name '*.h') CMakeLists.txt

.PHONY: setup demo test check bench soak docs site clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: setup  ## the main job on real data: digits, 4 workers, 3 seeds, against dense and fp16
	$(BIN)/laconic train digits --workers 4 --seeds 3 --name demo \
	    --with "dgc(density=0.01)" --against "dense()" --against "fp16()"

check: setup  ## what the linters and the types say
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

test: check  ## all tests; a slice of the slow laws
	$(BIN)/python -m pytest -q -m "not soak" -n logical --maxprocesses 4 --dist loadfile

soak: setup  ## the slow laws in full: repeats, fuzz with AddressSanitizer, kills
	$(BIN)/python -m pytest -q -m soak
	$(BIN)/python -m tests.native.fuzz --sanitize --count 1000000

bench: setup  ## a short pass of every benchmark, which writes nothing; without --quick they write their results
	$(BIN)/laconic bench kernels --quick
	$(BIN)/laconic bench quantisers --quick
	$(BIN)/laconic bench entropy --quick
	$(BIN)/laconic bench wire --quick
	$(BIN)/laconic bench steps --quick
	$(BIN)/laconic bench straggler --quick
	$(BIN)/laconic bench scaling --quick
	$(BIN)/laconic bench accuracy --quick

docs: setup  ## the tables that tests generate, and the site
	$(BIN)/python -m tests.dist.composition_page > docs/composition.md.new && mv docs/composition.md.new docs/composition.md
	$(BIN)/python -m docs.write
	$(MAKE) site

site: setup  ## the pages as a site, in build/site: open index.html
	$(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache
