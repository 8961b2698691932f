"""Every pair of (call, operation, type of values, type of x, format), on 1 to 9 virtual ranks (over MPI: tests/mpi)."""

import pytest
from contract import CASES, check

from sparsecoll import simulate


@pytest.mark.parametrize("P", range(1, 10))
def test_what_is_offered_is_right_and_what_is_not_is_refused(P):
    simulate(P, lambda comm: check(comm, CASES[P % 4 :: 4]), ranks_per_node=2)
