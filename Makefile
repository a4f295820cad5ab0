# Each target makes .venv by itself on first use; PYTHON chooses the interpreter that makes it.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: demo test test-all lint format venv clean

venv: .venv/.installed

# torch first: pinned, it is the CPU build; taken through a range it may be a CUDA build of several GB.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cp,dev,plot]'
	touch $@

demo: venv
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu_2proc.yaml examples/quickstart.py

# Two workers, a file at a time; a thread each, since several ranks of one test share the cores already.
test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# With the tests marked exhaustive, which `test` leaves out.
test-all: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m 'exhaustive or not exhaustive'

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist runs *.egg-info
