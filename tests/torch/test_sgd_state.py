"""SparseSGD: saved state."""

import io

import pytest
import torch
from nets import P, bits, compared, mean_loss, net, parameters, residuals, train

import sparsecoll
from sparsecoll import CommunicationError, simulate
from sparsecoll.torch import SparseSGD, redistribute


def saved(optimizer, model):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("named", [True, False])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(dtype, named):
    def program(comm):
        def fresh():
            model = net(dtype=dtype)
            algo = sparsecoll.OkTopk(tau=3, tau_prime=4)
            params = model.parameters() if named else list(model.parameters())
            optimizer = SparseSGD(params, 0.1, 0.9, comm=comm, density=0.3, algo=algo)
            return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def go_on(model, optimizer, schedule, steps):
            for step in steps:
                train(comm, model, optimizer, [step], dtype)
                schedule.step()

        whole, optimizer, schedule = fresh()
        go_on(whole, optimizer, schedule, range(9))
        model, optimizer, schedule = fresh()
        go_on(model, optimizer, schedule, range(5))
        state, rate = saved(optimizer, model), schedule.state_dict()
        model, optimizer, schedule = fresh()
        model.load_state_dict(state["model"])
        schedule.load_state_dict(rate)
        optimizer.load_state_dict(state["optimizer"])
        again = optimizer.state_dict()["sparsecoll"]  # before a step
        assert all(torch.equal(again["tensors"]["residual"][n], t) for n, t in residuals(optimizer).items())
        assert again["buckets"] == state["optimizer"]["sparsecoll"]["buckets"]
        go_on(model, optimizer, schedule, range(5, 9))
        return bits(model) == bits(whole)

    assert all(simulate(P, program).results)


def test_state_goes_to_torch_sgd_and_comes_from_it():
    def run(make, ranks, comm):
        model = net()
        optimizer = make(model.parameters(), 0.2, 0.9, weight_decay=0.01)
        for step in range(2):
            optimizer.zero_grad()
            mean_loss(model, ranks, step).backward()
            optimizer.step()
        plain = torch.optim.SGD(model.parameters())
        plain.load_state_dict(optimizer.state_dict())
        assert plain.param_groups[0]["momentum"] == 0.9
        optimizer = make(model.parameters())
        optimizer.load_state_dict(plain.state_dict())
        optimizer.zero_grad()
        mean_loss(model, ranks, 2).backward()
        optimizer.step()
        return parameters(model)

    compared(run, algo="dense")


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"rank": 0}, CommunicationError, "rank 1: .*expected the one of rank 1 of 2, got that of rank 0 of 2; load"),
        ({"size": 5}, CommunicationError, "rank 1: .*of rank 1 of 5; .*redistribute"),
        ({"compressor": "topk(k=1)"}, ValueError, "rank 1: .*expected the state of compressor SparseSGD"),
        ({"params": ["0.weight"]}, ValueError, "rank 1: .*expected 6 parameters, got 1"),
        ({"step": 7}, CommunicationError, "steps: expected the same value on all ranks"),
        ("shape", ValueError, r"rank 1: .*residual of '0.weight': expected shape \(24, 12\), got \(1,\)"),
        ("other", ValueError, "rank 1: .*expected that of SparseSGD or torch.optim.SGD, got another optimizer's"),
        ("groups", ValueError, "rank 1: .*parameter group"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all(change, kind, text):
    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm)
        train(comm, model, optimizer, range(2))
        state = good = optimizer.state_dict()
        own = dict(state["sparsecoll"])
        if comm.rank == 1:
            if change == "shape":
                own["tensors"] = {"residual": {**own["tensors"]["residual"], "0.weight": torch.zeros(1)}}
            elif change == "other":
                own = {"rank": 1, "size": 2, "algorithms": [{}]}
            elif isinstance(change, dict):
                own |= change
            state = {**state, "sparsecoll": own}
            if change == "groups":
                state["param_groups"] = []
        before = bits(model), residuals(optimizer)
        with pytest.raises(kind, match=text):
            optimizer.load_state_dict(state)
        assert all(torch.equal(residuals(optimizer)[n], t) for n, t in before[1].items())
        optimizer.load_state_dict(good)
        train(comm, model, optimizer, range(2, 4))
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("size", [1, 2, 5])
def test_redistribute_lets_everything_that_waits_arrive(size):
    def first(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, algo="allgather", density=0.05)
        train(comm, model, optimizer, range(4))
        return saved(optimizer, model)

    states = simulate(P, first).results
    waits = sum(s["optimizer"]["sparsecoll"]["tensors"]["residual"]["2.weight"] for s in states) / P

    def second(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, algo="allgather", density=1.0)
        model.load_state_dict(states[0]["model"])
        optimizer.load_state_dict(redistribute([s["optimizer"] for s in states], comm.rank, size))
        optimizer.step()
        return states[0]["model"]["2.weight"] - model[2].weight.detach()

    for moved in simulate(size, second).results:
        torch.testing.assert_close(moved, waits)


def test_distributed_checkpoints_state_dict_functions():
    """They take a step without gradients at learning rate 0, which must leave what waits alone."""
    functions = pytest.importorskip("torch.distributed.checkpoint.state_dict")

    def program(comm):
        model, other = net(), net(1)
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9 * (comm.size == 2), comm=comm, algo="oktopk", density=0.1)
        train(comm, model, optimizer, range(3))
        optimizer.zero_grad()
        before = bits(model), residuals(optimizer)
        state = functions.get_optimizer_state_dict(model, optimizer)
        assert bits(model) == before[0]
        assert all(torch.equal(residuals(optimizer)[n], t) for n, t in before[1].items())
        fresh = SparseSGD(other.parameters(), comm=comm, algo="oktopk")
        functions.set_optimizer_state_dict(other, fresh, state)
        assert fresh.param_groups[0]["lr"] == 0.1
        if comm.size == 2:
            a, b = (o.state[m[2].weight]["momentum_buffer"] for o, m in ((optimizer, model), (fresh, other)))
            assert torch.equal(a, b)

    simulate(2, program)
    simulate(3, program)


def test_what_waits_in_residuals_counts_as_much_after_the_method_has_changed():
    """A residual of learning rate * gradients counted lr times as much where residuals are of gradients."""

    def program(comm):
        model = net()
        first = SparseSGD(model.parameters(), 0.1, algo="allgather", density=0.01, comm=comm)
        train(comm, model, first, range(3))
        state, waits = first.state_dict(), residuals(first)
        second = SparseSGD(model.parameters(), 0.1, comm=comm)
        second.load_state_dict(state)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(60):  # until all has been sent
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            second.step()
        found = zip(before, model.named_parameters(), strict=True)
        return [(start - p.detach(), waits[name]) for start, (name, p) in found]

    results = simulate(2, program).results
    for own in zip(*results, strict=True):
        mean = sum(w for _, w in own) / 2
        for moved, _ in own:
            torch.testing.assert_close(moved, mean, atol=1e-4, rtol=1e-2)
