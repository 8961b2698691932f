"""Wrong uses: a type checker must report every line that ends in `# wrong`, and no other one; checked, not run."""

import numpy as np

import sparsecoll

x = sparsecoll.SparseVector([1], np.ones(1), 5)


def program(comm: sparsecoll.Comm) -> None:
    sparsecoll.allreduce(comm, x).nonsense  # wrong
    sparsecoll.allreduce(comm, x, "oktpk")  # wrong
    sparsecoll.allreduce(comm, x, op="summ")  # wrong
    sparsecoll.allreduce(comm, x, format="cooo")  # wrong
    sparsecoll.allreduce(comm, x, nonfinite="rais")  # wrong
    sparsecoll.allreduce(comm, x, missing="zeros")  # wrong
    sparsecoll.allreduce(comm, x, value_dtype="float8")  # wrong
    sparsecoll.allreduce(comm, x, densty=0.1)  # wrong
    sparsecoll.allgather(comm, x, k=3)  # wrong
    sparsecoll.reduce(comm, x).nnz  # wrong
    sparsecoll.reduce_scatter(comm, x, owner="rank")  # wrong
    sparsecoll.allreduce(comm, x, return_reduction=True).nnz  # wrong
    sparsecoll.iallreduce(comm, x).nnz  # wrong
    sparsecoll.allreduce("world", x)  # wrong
    sparsecoll.allreduce(comm, x, "oktopk", k="3")  # wrong


sparsecoll.simulate(2, program).results[0].nnz  # wrong
