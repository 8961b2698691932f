"""Every pair of (call, operation, type of values, type of x, format) over MPI: right, or refused on all ranks."""

import pytest
from contract import CASES, LIBRARIES, check


@pytest.mark.mpi
def test_what_is_offered_is_right_and_what_is_not_is_refused(comm, mpi):
    quick = [case for case in CASES if case["kind"] not in LIBRARIES]  # which take seconds to import
    check(comm, quick[comm.size % 2 :: 2])  # MPICH runs it on 8 ranks, Open MPI on 5
