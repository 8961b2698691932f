"""DistributedOptimizer and DDP's hook over MPI: as on virtual ranks, with overlap and without, side by side."""

import pytest
import torch
from simulated import simulated

import sparsecoll
from sparsecoll.torch import COMPRESSORS, DistributedOptimizer, HookState, comm_hook
from sparsecoll.torch.compressors import COVAP, DRAGONN, TopKCompressor

pytestmark = pytest.mark.mpi
AUTO = sparsecoll.Auto(network=sparsecoll.Network())  # else each transport has its own
MADE = {
    "covap": COVAP(3),
    "topk": TopKCompressor(algo=AUTO),
    "dragonn": DRAGONN(selective=False),
}


def net(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 60), torch.nn.ReLU(), torch.nn.Linear(60, 40), torch.nn.ReLU(), torch.nn.Linear(40, 5)
    )


def bits(model):
    return torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy().tobytes()


def trained(comm, rank, compressor, steps=6, **options):
    torch.set_num_threads(1)  # holds for the calling thread, and virtual ranks are threads
    model = net(rank)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    options = {"bucket_bytes": 6000, "dense_below": 50, **options}
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, compressor, **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(8, 20, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.close()
    return bits(model)


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name != "free"])
def test_training_equals_the_simulator_and_replicas_agree(comm, name):
    compressor = MADE.get(name, name)
    mine = trained(comm, comm.rank, compressor)
    assert set(comm.allgather(mine)) == {mine}
    theirs = simulated(comm, lambda sim: trained(sim, sim.rank, compressor))
    if name not in ("powersgd", "acpsgd"):  # torch's matrix products depend on the thread that calls them
        assert theirs == mine
    assert trained(comm, comm.rank, compressor, overlap=False) == mine


def test_a_measured_interval_is_the_same_everywhere(comm):
    mine = trained(comm, comm.rank, "covap", steps=12)
    assert set(comm.allgather(mine)) == {mine}


def test_two_models_on_sub_communicators(comm):
    own = comm.Split(comm.rank % 2, comm.rank)
    mine = trained(own, comm.rank, TopKCompressor(0.05, algo="allgather"))
    assert set(own.allgather(mine)) == {mine}
    ranks = range(comm.rank % 2, comm.size, 2)
    assert simulated(own, lambda sim: trained(sim, ranks[sim.rank], TopKCompressor(0.05, algo="allgather"))) == mine


def test_training_moves_to_another_communicator(comm):
    half = comm.Split(comm.rank % 2, comm.rank)
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(40, 50)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, "oktopk", dense_below=0)

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    held = optimizer.state_dict()["sparsecoll"]["tensors"]["residual"]
    optimizer.move(half)
    moved = optimizer.state_dict()["sparsecoll"]
    assert (moved["rank"], moved["size"]) == (half.rank, half.size)  # it can be saved and loaded there at once
    now = moved["tensors"]["residual"]
    assert all(torch.equal(held[name], now[name]) for name in held)
    for _ in range(3):
        step()
    optimizer.close()
    bits = [p.detach().numpy().tobytes() for p in model.parameters()]
    assert all(other == bits for other in half.allgather(bits))
    half.Free()


@pytest.mark.parametrize("name", ["none", "fp16", "topk", "oktopk", "dgc", "powersgd", "acpsgd"])
def test_ddp_hook(process_group, name):
    comm = process_group

    def run(hook):
        torch.set_num_threads(1)
        model = torch.nn.parallel.DistributedDataParallel(net(comm.rank), bucket_cap_mb=0.005)
        state = HookState(comm, name, model.module.named_parameters()) if hook else None
        if hook:
            model.register_comm_hook(state, comm_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(6):
            x = torch.randn(8, 20, generator=generator)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model.module

    mine = run(hook=True)
    assert set(comm.allgather(bits(mine))) == {bits(mine)}
    if name == "none":
        for ours, theirs in zip(mine.parameters(), run(hook=False).parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_ddp_hooks_residuals_are_saved_by_name(process_group):
    comm = process_group
    model = torch.nn.parallel.DistributedDataParallel(net(0))
    names = [name for name, _ in model.module.named_parameters()]
    states = [
        HookState(comm, TopKCompressor(0.01, algo="allgather"), model.module.named_parameters()) for _ in range(2)
    ]
    model.register_comm_hook(states[0], comm_hook)
    model(torch.ones(3, 20)).sum().backward()
    assert not states[0].state_dict()["tensors"]["residual"][names[0]].any()  # the step is not taken yet
    others = torch.nn.Linear(2, 2)  # such as the weights of a loss, which DDP does not know
    torch.optim.SGD([{"params": others.parameters()}, {"params": model.parameters()}], 0.1).step()
    saved = states[0].state_dict()
    assert set(saved["tensors"]["residual"]) == set(names) and saved["step"] == 1
    assert any(t.abs().sum() > 0 for t in saved["tensors"]["residual"].values())
    states[1].load_state_dict(saved)
    again = states[1].state_dict()["tensors"]["residual"]
    assert all(torch.equal(again[name], t) for name, t in saved["tensors"]["residual"].items())
    with pytest.raises(sparsecoll.CommunicationError, match=f"rank 0: .*expected the one of rank 0 of {comm.size}"):
        states[1].load_state_dict({**saved, "rank": comm.size})


@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_the_ddp_hooks_residuals_have_the_order_of_their_parameters(process_group, name):
    """Also if that of their memory is another one, and if they are loaded where it is not."""
    comm = process_group

    def made(memory_format, transposed):
        torch.manual_seed(0)
        conv, head = torch.nn.Conv2d(3, 4, 3).to(memory_format=memory_format), torch.nn.Linear(4, 5)
        if transposed:
            head.weight = torch.nn.Parameter(head.weight.detach().t().contiguous().t())
        model = torch.nn.Sequential(conv, torch.nn.Flatten(2), torch.nn.AdaptiveAvgPool1d(1), torch.nn.Flatten(), head)
        model = torch.nn.parallel.DistributedDataParallel(model)
        state = HookState(comm, name, model)
        model.register_comm_hook(state, comm_hook)
        return model, state

    model, state = made(torch.channels_last, True)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(comm.rank))
    model(x).square().sum().backward()
    given = torch.autograd.grad(model.module(x).square().sum(), [*model.parameters()])
    torch.optim.SGD(model.parameters(), 0.1).step()
    saved = state.state_dict()
    for gradient, (key, p) in zip(given, model.module.named_parameters(), strict=True):
        left = (gradient - saved["tensors"]["residual"][key]).contiguous().numpy()
        torch.testing.assert_close(torch.from_numpy(comm.allreduce(left)) / comm.size, p.grad, rtol=1e-4, atol=1e-4)
    _, plain = made(torch.contiguous_format, False)
    plain.load_state_dict(saved)
    for other in (state, plain):
        other.load_state_dict(saved)
        again = other.state_dict()["tensors"]["residual"]
        assert all(torch.equal(again[key], t) for key, t in saved["tensors"]["residual"].items())


@pytest.mark.parametrize("given", [True, False])
def test_the_ddp_hook_refuses_complex_parameters(process_group, given):
    class Turn(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x):
            return (x * self.weight).abs().sum()

    model = torch.nn.parallel.DistributedDataParallel(Turn())
    with pytest.raises(TypeError, match=r"expected floating-point tensors, got torch\.complex64: keep real numbers"):
        model.register_comm_hook(HookState(process_group, "topk", model if given else ()), comm_hook)
        model(torch.ones(4)).backward()


@pytest.mark.parametrize("I", [2, 3])
def test_covap_in_the_ddp_hook_sends_its_buckets_in_turn(process_group, I):
    """All are sent until DDP has made its last buckets, and they are known: for two steps. Then Definition 1 holds."""
    comm = process_group
    torch.manual_seed(0)
    layers = [torch.nn.Linear(300, 300) for _ in range(5)]  # 360 kB each
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.3)
    state = HookState(None, COVAP(I, start=1.0), model)
    model.register_comm_hook(state, comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)  # the gradients stay the same
    moved, means = [], []
    for _ in range(2 + 2 * I):
        optimizer.zero_grad()
        before = state.transport.traffic.total.bytes_received
        model(torch.full((2, 300), 1.0 + comm.rank)).sum().backward()
        moved.append(state.transport.traffic.total.bytes_received - before)
        means.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    whole, P = 5 * (300 * 300 + 300) * 4, comm.size
    assert all(2 * whole * (P - 1) / P <= sent <= 2 * whole * (P - 1) / P + 20_000 for sent in moved[:2])
    assert sum(moved[2 : 2 + I]) <= 2 * whole * (P - 1) / P + 20_000 * I and max(moved[2:]) < 0.8 * min(moved[:2])
    for before, *after in zip(means[1], *means[2:], strict=True):
        sent = [mean for mean in after if mean.any()]
        assert 1 <= len(sent) <= 2 * I
        torch.testing.assert_close(sum(after), len_of(after) * before, rtol=1e-4, atol=1e-5)


def len_of(means):
    """The number of steps whose gradients have been sent: up to the last mean that is not zero."""
    return max(number for number, mean in enumerate(means, 1) if mean.any())
