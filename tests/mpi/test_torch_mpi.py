"""SparseSGD over MPI: the same parameters, bit for bit, as on virtual ranks."""

import pytest

torch = pytest.importorskip("torch")

import sparsecoll  # noqa: E402
from sparsecoll import OkTopk, simulate  # noqa: E402
from sparsecoll.torch import SparseSGD  # noqa: E402
from sparsecoll.transport import as_transport  # noqa: E402
from sparsecoll.transport.collectives import node_members  # noqa: E402

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("algo", sparsecoll.ALGORITHMS)
def test_training_equals_the_simulator_and_replicas_agree(algo):
    from mpi4py import MPI

    def program(comm):
        torch.set_num_threads(1)  # holds for the calling thread, and virtual ranks are threads
        torch.manual_seed(comm.rank)
        model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 5))
        made = {"oktopk": OkTopk(tau=4, tau_prime=3), "auto": sparsecoll.Auto(tuning=sparsecoll.Tuning())}
        chosen = made.get(algo, algo)
        optimizer = SparseSGD(model.parameters(), 0.1, comm, chosen, 0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(10):
            x = torch.randn(8, 20, generator=generator)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy().tobytes()

    comm = MPI.COMM_WORLD
    mine = program(comm)
    assert set(comm.allgather(mine)) == {mine}
    on_node = 1 if algo != "hierarchical" else len(node_members(as_transport(comm))[0])  # one machine, or equal ones
    assert simulate(comm.size, program, ranks_per_node=on_node).results[comm.rank] == mine


def test_comm_none_is_the_world():
    from mpi4py import MPI

    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = SparseSGD([weight], 1.0, algo="dense")
    weight.grad = torch.full((4,), float(MPI.COMM_WORLD.rank))
    optimizer.step()
    assert weight.detach().tolist() == [-(MPI.COMM_WORLD.size - 1) / 2] * 4
