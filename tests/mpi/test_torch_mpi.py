"""SparseSGD over MPI, where other optimizers' threads send beside it: as on virtual ranks, and as on one process."""

import pytest
import torch
from simulated import simulated

import sparsecoll
from sparsecoll import CommunicationError, OkTopk
from sparsecoll.errors import NonFiniteError
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, OneBitAdam, SparseSGD
from sparsecoll.torch.compressors import TopKCompressor
from sparsecoll.transport import as_transport
from sparsecoll.transport.all_ranks import node_members

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)  # holds for the calling thread, and virtual ranks are threads


def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 5)).double()


def data(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 20, generator=generator).double()


def bits(model):
    return (
        torch.cat([t.detach().reshape(-1).double() for t in (*model.parameters(), *model.buffers())]).numpy().tobytes()
    )


@pytest.mark.parametrize("algo", sparsecoll.ALGORITHMS)
def test_training_equals_the_simulator_and_replicas_agree(comm, algo):
    def program(comm):
        torch.set_num_threads(1)
        model = net(comm.rank)
        made = {"oktopk": OkTopk(tau=4, tau_prime=3), "auto": sparsecoll.Auto(network=sparsecoll.Network())}
        chosen = made.get(algo, algo)
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, algo=chosen, density=0.05)
        for step in range(10):
            optimizer.zero_grad()
            model(data(comm.rank, step)).square().mean().backward()
            optimizer.step()
        return bits(model)

    mine = program(comm)
    assert set(comm.allgather(mine)) == {mine}
    on_node = 1 if algo != "hierarchical" else len(node_members(as_transport(comm))[0])  # one machine, or equal ones
    assert simulated(comm, program, ranks_per_node=on_node) == mine


def test_comm_none_is_the_world(comm):
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = SparseSGD([weight], 1.0, algo="dense")
    weight.grad = torch.full((4,), float(comm.rank))
    optimizer.step()
    assert weight.detach().tolist() == [-(comm.size - 1) / 2] * 4


def halves(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(20, 40).double(), torch.nn.Linear(40, 5).double()


@pytest.mark.parametrize("other", ["SparseSGD", "DistributedOptimizer"])
def test_a_whole_loop_beside_another_optimizer_is_that_of_one_process(comm, other):
    """Schedules, a GradScaler with an overflow on one rank, unfreezing, a new group, a layer used on one rank only."""

    def run(make, make_other, ranks):
        first, second = halves(0 if len(ranks) > 1 else ranks[0])
        third = torch.nn.Linear(20, 20).double()
        torch.nn.init.eye_(third.weight)
        first.bias.requires_grad_(False)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        given = {} if len(ranks) > 1 else {"grad_scaler": scaler}
        mine = make(first.parameters(), 0.1, 0.9, weight_decay=0.01, **given)
        others = make_other(torch.optim.AdamW(second.parameters(), 0.01), second, **given)
        schedule = torch.optim.lr_scheduler.LambdaLR(mine, lambda step: (0, 1, 0.3, 0.5)[step % 4])
        for step in range(10):
            if step == 4:
                first.bias.requires_grad_(True)
            if step == 6:
                mine.add_param_group({"params": third.parameters(), "lr": 0.02})
                schedule = torch.optim.lr_scheduler.LambdaLR(mine, lambda step: 1 / (1 + step))
            mine.zero_grad()
            others.zero_grad()
            loss = 0
            for r in ranks:
                x = third(data(r, step)) if step > 6 and r == 0 else data(r, step)
                loss = loss + second(first(x).tanh()).square().mean() / len(ranks)
            scaler.scale(loss).backward()
            if step == 3 and ranks[-1] == comm.size - 1:
                first.weight.grad[0, 0] = float("inf")
            scaler.step(others)
            scaler.step(mine)
            scaler.update()
            schedule.step()
        return [*first.parameters(), *second.parameters(), *third.parameters(), torch.tensor(scaler.get_scale())]

    def make(*arguments, **options):
        return SparseSGD(*arguments, comm=comm, algo="dense", **options)

    def make_other(inner, model, **options):
        if other == "SparseSGD":
            return SparseSGD(model.parameters(), 0.05, comm=comm, algo="dense", **options)
        return DistributedOptimizer(inner, model, comm, "none", bucket_bytes=100, **options)

    def plain_other(inner, model):
        return inner if other == "DistributedOptimizer" else torch.optim.SGD(model.parameters(), 0.05)

    mine = run(make, make_other, [comm.rank])
    expected = run(torch.optim.SGD, plain_other, list(range(comm.size)))
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_errors_are_raised_on_all_ranks_and_training_goes_on(comm):
    last = comm.size - 1
    model = net(comm.rank)
    with pytest.raises(ValueError, match=f"rank {last}: density: expected in"):
        SparseSGD(model.parameters(), comm=comm, density=3 if comm.rank == last else 0.1, timeout=60)
    with pytest.raises(TypeError, match=f"rank {last}: timeout: expected seconds"):
        SparseSGD(model.parameters(), comm=comm, timeout="5" if comm.rank == last else 60)
    optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, density=0.1, timeout=60, verify=1)
    for step in range(5):
        optimizer.zero_grad()
        model(data(comm.rank, step)).square().mean().backward()
        if step % 2 == 0:
            optimizer.step()
            continue
        before = [p.detach().clone() for p in model.parameters()]
        if comm.rank == last:
            model[2].bias.grad[0] = float("nan")
        with pytest.raises(NonFiniteError, match=rf"^rank {last}: gradient of '2\.bias': expected finite values"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
    state = optimizer.state_dict()
    if comm.size > 1:
        with pytest.raises(CommunicationError, match=r"rank 1: .*expected the one of rank 1"):
            optimizer.load_state_dict(comm.bcast(state))
    optimizer.load_state_dict(state)
    assert len(set(comm.allgather(bits(model)))) == 1


def test_join_and_another_communicator(comm):
    model = net(comm.rank)
    optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, density=0.1, timeout=60)

    def go(steps):
        for step in steps:
            optimizer.zero_grad()
            model(data(comm.rank, step)).square().mean().backward()
            optimizer.step()

    with optimizer.join():
        go(range(2 + 2 * comm.rank))
    assert len(set(comm.allgather(bits(model)))) == 1
    half = comm.Split(comm.rank % 2, comm.rank)
    optimizer.move(half)
    go(range(3))
    assert len(set(half.allgather(bits(model)))) == 1
    half.Free()


@pytest.mark.parametrize("stream", [{}, {"every": 6, "fragments": 3, "delay": 4, "alpha": 0.5, "outer_momentum": 0.5}])
def test_local_steps_equal_the_simulator_and_ranks_meet_after_each_mean(comm, stream):
    """Means with a delay are formed on the progress thread; on ranks without data, until others have none either."""

    def program(comm):
        torch.set_num_threads(1)
        model = net(comm.rank)
        compressor = TopKCompressor(0.05, "allgather", format="packed_codes")
        inner = torch.optim.AdamW(model.parameters(), 0.01)
        optimizer = LocalOptimizer(inner, model, comm, compressor, **{"every": 3, "dense_below": 0, **stream})

        def go(steps):
            for step in steps:
                optimizer.zero_grad()
                model(data(comm.rank, step)).square().mean().backward()
                optimizer.step()

        go(range(8))
        optimizer.synchronize()
        met = bits(model)
        with optimizer.join():
            go(range(8, 20 + 3 * comm.rank))
        return met, bits(model)

    mine = program(comm)
    assert set(comm.allgather(mine)) == {mine}
    assert simulated(comm, program) == mine


def test_one_bit_adam_equals_the_simulator_and_all_ranks_have_the_same_bits(comm):
    def program(comm):
        torch.set_num_threads(1)
        model = net(comm.rank)
        optimizer = OneBitAdam(model.parameters(), 0.01, warm_up=6, every=3, comm=comm, bucket=64, verify=1)

        def go(steps):
            for step in steps:
                optimizer.zero_grad()
                model(data(comm.rank, step)).square().mean().backward()
                optimizer.step()

        go(range(5))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        go(range(5, 14))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        with optimizer.join():
            go(range(14, 16 + comm.rank))
        assert not optimizer.warming_up
        return bits(model)

    mine = program(comm)
    assert set(comm.allgather(mine)) == {mine}
    assert simulated(comm, program) == mine
