"""A MemoryError at functions within a call over a real MPI; see memory_errors.py, which has one in one process."""

import memory_errors
import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("algo", "form"), [("dense", "auto"), ("allgather", "packed"), ("oktopk", "coo"), ("auto", "auto")]
)
def test_a_memory_error_at_any_function_is_raised_on_all_ranks(comm, algo, form):
    make = memory_errors.calls_of(algo, form)
    expected, raised = comm.allgather(make(comm)), 0
    for nth in range(1 + len(algo), 700, 97):  # those behind the last function raise nothing
        own, found = comm.Dup(), []
        results = comm.allgather(memory_errors.program(make, nth, found)(own))
        assert not memory_errors.complaint(results, expected), (nth, found and found[0].where)
        raised += bool(found and found[0].where)
        own.Free()
    assert comm.allreduce(raised)
