"""A sample of memory_errors.py; `make fuzz` has every function."""

import memory_errors
import pytest

EVERY = 500


@pytest.mark.parametrize("world", memory_errors.WORLDS)
def test_a_memory_error_at_any_function_is_raised_on_all_ranks(world):
    if world == "MPI":
        try:
            from mpi4py import MPI  # noqa: F401
        except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no library
            pytest.skip(str(error))
    injections = 0
    for number, (algo, form) in enumerate(memory_errors.cases()):
        counts, texts = memory_errors.inject(world, algo, form, EVERY, 1 + 61 * number % EVERY)
        assert not texts, texts
        injections += counts["injections"]
    print(f"{world}: {injections} injections")
    assert injections > 20
