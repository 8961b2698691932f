"""What every algorithm of the registry promises, on the simulator."""

import numpy as np
import pytest
from cases import DISTRIBUTIONS, case
from oracles import EXPECTED

import sparsecoll
from sparsecoll import ALGORITHMS, SparseVector, simulate
from sparsecoll.testing import check_algorithm


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_keeps_the_contract(algo):
    check_algorithm(ALGORITHMS[algo](), EXPECTED.get(algo), long=algo != "dense")


@pytest.mark.parametrize("P", [3, 8])
@pytest.mark.parametrize("algo", [name for name in ALGORITHMS if name != "spardl"])
def test_a_rank_contributes_only_at_its_own_indices(algo, P):
    for name in DISTRIBUTIONS:
        inputs = [case(name, rank, P) for rank in range(P)]
        run = simulate(P, lambda comm, x=inputs: sparsecoll.allreduce(comm, x[comm.rank], algo, return_reduction=True))
        assert all(np.isin(r.contributed.indices, x.indices).all() for x, r in zip(inputs, run.results, strict=True))


LOSSLESS = [name for name, form in sparsecoll.formats.FORMATS.items() if not form.lossy]


@pytest.mark.parametrize("P", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("format", LOSSLESS)
def test_an_exact_sum_holds_every_index_that_some_rank_holds(format, P):
    """Explicit zeros of both signs, sums that cancel, and values that become zero on the wire."""
    algos = ["hierarchical", sparsecoll.DenseStream(repartition="even")]
    algos += [sparsecoll.SparCML(variant="recursive_double"), sparsecoll.SparCML(variant="dynamic")]

    def program(comm):
        indices = np.array([3, 7, 8, 9, 11 + comm.rank, 60])
        values = np.array([1 - 2 * (comm.rank % 2) if comm.rank < P - P % 2 else 0, 0, -0.0, 1e-9, 2, 0], np.float32)
        x, found = SparseVector(indices, values, 64), []
        options = {"format": format, "value_dtype": "float16"}
        for algo in algos:
            y = sparsecoll.allreduce(comm, x, algo, return_reduction=True, **options)
            found.append(y.value.indices.tolist())
        reduced = sparsecoll.reduce(comm, x, P - 1, **options)
        part = sparsecoll.reduce_scatter(comm, x, **options)
        gathered = [y.indices.tolist() for y in sparsecoll.allgather(comm, x, **options)]
        sent = sparsecoll.bcast(comm, x, **options)
        at_root = None if reduced is None else reduced.indices.tolist()
        return found, at_root, part.indices.tolist(), gathered, sent.indices.tolist()

    union = [3, 7, 8, 9, *range(11, 11 + P), 60]
    results = simulate(P, program, ranks_per_node=2).results
    own = [[3, 7, 8, 9, 11 + rank, 60] for rank in range(P)]
    for found, reduced, _, gathered, sent in results:
        assert found == [union] * len(algos)
        assert reduced in (None, union) and gathered == own and sent == own[0]
    assert results[-1][1] == union and [i for _, _, part, _, _ in results for i in part] == union
