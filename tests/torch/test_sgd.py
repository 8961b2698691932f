"""SparseSGD is torch.optim.SGD on the mean gradient where nothing is compressed, and loses nothing where something is.

Every test compares with one process that has the global batch, or with what the paper's residual does.
"""

import copy
import io
import logging
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, loss_of, net, train  # noqa: E402

import sparsecoll  # noqa: E402
from sparsecoll import CommunicationError, simulate  # noqa: E402
from sparsecoll.errors import NonFiniteError  # noqa: E402
from sparsecoll.torch import SparseSGD, Timeline, redistribute  # noqa: E402

P = 3
EXACT = [{"algo": "dense"}, {"algo": "allgather", "density": 1.0}, {"algo": "oktopk", "density": 1.0}]


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def close(mine, theirs, rtol=1e-9, atol=1e-12):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def residuals(optimizer):
    return optimizer.state_dict()["sparsecoll"]["tensors"].get("residual", {})


def compared(run, *, P=P, **options):
    """Run a loop on one process with the global batch, and on P ranks; the results must be close.

    `run(make, ranks, comm)` builds a model, calls `make(params, **settings)` and trains on the batches of `ranks`.
    """
    expected = run(torch.optim.SGD, range(P), None)

    def program(comm):
        return run(lambda params, *a, **s: SparseSGD(params, *a, comm=comm, **options, **s), [comm.rank], comm)

    for result in simulate(P, program).results:
        close(result, expected)


def mean_loss(model, ranks, step):
    return sum(loss_of(model, batch(rank, step)) for rank in ranks) / len(ranks)


SETTINGS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05},
    {"maximize": True, "momentum": 0.5, "weight_decay": 0.05},
]
SCHEDULES = {
    "decay": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
    "warm-up from 0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 4),
    "restarts through 0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: (1, 0.4, 0)[step % 3]),
}


CASES = [(EXACT[0], settings, "restarts through 0") for settings in SETTINGS]
CASES += [(options, SETTINGS[3], schedule) for options in EXACT for schedule in SCHEDULES]


@pytest.mark.parametrize(("options", "settings", "schedule"), CASES, ids=str)
def test_uncompressed_steps_are_those_of_torch_sgd(options, settings, schedule):
    """A learning rate that changes, two parameter groups."""

    def run(make, ranks, comm):
        model = net(seed=0 if comm is None else comm.rank)  # only rank 0's parameters count
        groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": [*model[2:].parameters()]}]
        optimizer = make(groups, 0.2, **settings)
        scheduler = SCHEDULES[schedule](optimizer)
        for step in range(7):
            optimizer.zero_grad()
            mean_loss(model, ranks, step).backward()
            optimizer.step()
            scheduler.step()
        return parameters(model)

    compared(run, **options)


@pytest.mark.parametrize("algo", sparsecoll.ALGORITHMS)
def test_replicas_stay_the_same_bits_and_the_loss_falls(algo):
    def program(comm):
        model = net(seed=comm.rank, dtype=torch.float32)
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, algo=algo, density=0.05, verify=10)
        data = batch(comm.rank, 0, torch.float32)
        first = loss_of(model, data).item()
        for _ in range(80):
            optimizer.zero_grad()
            loss_of(model, data).backward()
            optimizer.step()
        return bits(model), first, loss_of(model, data).item()

    results = simulate(4, program).results
    assert len({b for b, _, _ in results}) == 1
    assert np.mean([after for _, _, after in results]) < 0.6 * np.mean([before for _, before, _ in results])


@pytest.mark.parametrize("momentum", [0, 0.5])
@pytest.mark.parametrize("algo", sparsecoll.ALGORITHMS)
def test_gradient_mass_is_conserved(algo, momentum):
    """P * what moved the parameters + residuals of all ranks = all gradients, at the learning rates of their steps.

    With momentum: P * what went into the velocity. Layers take turns; values are rounded on the wire.
    """

    def program(comm):
        model = net()
        heads = [torch.nn.Linear(64, 3).double() for _ in range(2)]
        params = [*model[:4].parameters(), *(p for head in heads for p in head.parameters())]
        optimizer = SparseSGD(params, 0.1, momentum, comm=comm, algo=algo, density=0.03, value_dtype="float16")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1, 0.1, 0.5, 0)[step % 4])
        start = [p.detach().clone() for p in params]
        given, into = ([torch.zeros_like(p) for p in params] for _ in range(2))
        for step in range(11):
            optimizer.zero_grad()
            x, y = batch(comm.rank, step)
            torch.nn.functional.cross_entropy(heads[step % 2](model[:4](x)), y).backward()
            before = [optimizer.state.get(p, {}).get("momentum_buffer", torch.zeros_like(p)).clone() for p in params]
            for total, p in zip(given, params, strict=True):
                if p.grad is not None:
                    total.add_(p.grad, alpha=1 if momentum else optimizer.param_groups[0]["lr"])
            optimizer.step()
            if momentum:
                for total, p, old in zip(into, params, before, strict=True):
                    now = optimizer.state[p].get("momentum_buffer", old)
                    total += 0 if torch.equal(now, old) else now - momentum * old
            schedule.step()
        moved = into if momentum else [a - b.detach() for a, b in zip(start, params, strict=True)]
        return given, list(residuals(optimizer).values()), moved

    results = simulate(P, program).results
    for n, moved in enumerate(results[0][2]):
        expected, kept = sum(r[0][n] for r in results), sum(r[1][n] for r in results)
        torch.testing.assert_close(P * moved + kept, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_restarts_do_not_blow_up_what_waits(momentum):
    """Cosine annealing ends near 0, at 1e-18 or so, and begins again."""

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, momentum, comm=comm, density=0.03, value_dtype="float16")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1, 0.5, 0.1, 1e-5, 1e-17)[step % 5])
        first = loss_of(model, batch(comm.rank, 0)).item()
        for _ in range(60):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, 0)).backward()
            optimizer.step()
            schedule.step()
        return loss_of(model, batch(comm.rank, 0)).item() / first

    assert np.mean(simulate(P, program).results) < 1


def test_momentum_that_is_switched_on_and_off_keeps_what_waits():
    def program(comm):
        p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        optimizer = SparseSGD([p], 0.1, comm=comm, algo="allgather", k=1)
        p.grad = torch.tensor([4.0, 3, 2, 1], dtype=torch.float64)
        optimizer.step()  # p[0] -= 0.1 * 4
        p.grad = None
        optimizer.param_groups[0]["momentum"] = 1e-12
        optimizer.step()  # p[1] -= 0.1 * 3
        optimizer.param_groups[0] |= {"momentum": 0, "lr": 0.2}
        optimizer.step()  # p[2] -= 0.2 * 2
        return p.detach(), residuals(optimizer)["0"]

    for p, left in simulate(1, program).results:
        close([p, left], [torch.tensor([-0.4, -0.3, -0.4, 0]).double(), torch.tensor([0, 0, 0, 0.2]).double()], 1e-6)


# -- which parameters take part


@pytest.mark.parametrize("settings", [{"momentum": 0.9, "weight_decay": 0.05}, {"weight_decay": 0.05}], ids=str)
def test_frozen_unused_unfrozen_and_added_parameters_are_as_in_torch(settings):
    """Layers frozen at the start, used in turns, unfrozen later, put into a group by hand and with add_param_group."""

    def run(make, ranks, comm):
        model, heads = net(), [torch.nn.Linear(64, 3).double() for _ in range(2)]
        late = [torch.nn.Linear(12, 12).double() for _ in range(2)]
        model[0].requires_grad_(False)
        optimizer = make([*model.parameters(), *heads[0].parameters(), *heads[1].parameters()], 0.2, **settings)
        seen = []
        for step in range(9):
            if step == 3:
                model[0].requires_grad_(True)
                optimizer.param_groups[0]["params"] += late[0].parameters()
            if step == 5:
                model[2].requires_grad_(False)
                optimizer.add_param_group({"params": late[1].parameters(), "lr": 0.1})
            optimizer.zero_grad()
            loss = 0
            for rank in ranks:
                x, y = batch(rank, step)
                for layer in late[: (step >= 3) + (step >= 5)]:
                    x = layer(x)
                head = heads[(step + rank) % 2] if step < 7 else heads[0]  # on some ranks only; at last on none
                loss = loss + torch.nn.functional.cross_entropy(head(model[:4](x)), y) / len(ranks)
            loss.backward()
            optimizer.step()
            seen.append(model[0].weight.detach().clone())
        return [*seen, *parameters(model), *(p.detach() for m in (*heads, *late) for p in m.parameters())]

    compared(run, algo="dense")


def test_what_waits_arrives_later_and_waits_while_its_parameter_is_frozen():
    def program(comm):
        a, b = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
        optimizer = SparseSGD([a, b], 1.0, comm=comm, algo="allgather", k=1)
        a.grad, b.grad = torch.linspace(1, 2, 50), torch.linspace(3, 4, 50)
        optimizer.step()
        before = b.detach().clone()
        b.requires_grad_(False)
        a.grad = b.grad = None
        optimizer.step()  # of a, which has no gradient, but something waits
        frozen = torch.equal(b, before) and int((residuals(optimizer)["1"] > 0).sum()) == 49
        b.requires_grad_(True)
        for _ in range(98):
            optimizer.step()
        return frozen, a.detach(), b.detach(), residuals(optimizer)

    for frozen, a, b, left in simulate(2, program).results:
        assert frozen and not any(t.any() for t in left.values())
        close([a, b], [-torch.linspace(1, 2, 50), -torch.linspace(3, 4, 50)], 1e-6, 1e-6)


def test_kinds_of_parameters():
    """Transposed, half, double, integer, empty, scalar and channels_last parameters, and a closure's mean loss."""

    def run(make, ranks, comm):
        offset = 0 if comm is None else comm.rank
        turned = torch.nn.Parameter(torch.arange(20.0).view(5, 4).t() + offset)
        half = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        double = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        whole = torch.nn.Parameter(torch.ones(3, dtype=torch.int8) + offset, requires_grad=False)
        empty = torch.nn.Parameter(torch.ones(0, 3))
        conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            conv.weight.copy_(torch.linspace(-1, 1, 108).view(4, 3, 3, 3) + offset)
            conv.bias.fill_(offset)
        optimizer = make([turned, half, double, whole, empty, *conv.parameters()], 0.5, momentum=0.5)
        image = torch.linspace(0, 1, 75).view(1, 3, 5, 5).to(memory_format=torch.channels_last)

        def closure():
            optimizer.zero_grad()
            loss = (turned**2).sum() / 40 + (half.float() ** 2).sum() + empty.sum()
            loss = loss + sum(rank * double**2 for rank in ranks) / len(ranks)
            loss = loss + sum(conv(image * (rank + 1)).square().mean() for rank in ranks) / len(ranks)
            loss.backward()
            return loss

        values = [optimizer.step(closure).detach().float() for _ in range(3)]
        return [p.detach() for p in (turned, half, double, whole, empty, *conv.parameters())] + values

    expected = run(torch.optim.SGD, range(2), None)
    for options in (*EXACT, {"algo": "allgather", "k": 10_000}):

        def program(comm, options=options):
            return run(lambda *a, **s: SparseSGD(*a, comm=comm, **options, **s), [comm.rank], comm)

        for result in simulate(2, program).results:
            assert [t.dtype for t in result] == [t.dtype for t in expected]
            close(result, expected, 1e-5, 1e-5)


def test_sparse_embedding_gradients():
    def run(make, ranks, comm):
        embedding = torch.nn.Embedding(10, 3, sparse=True)
        torch.nn.init.ones_(embedding.weight)
        optimizer = make(embedding.parameters(), 1.0)
        for _ in range(2):
            optimizer.zero_grad()
            (sum(embedding(torch.tensor([rank, rank, 5])).square().sum() for rank in ranks) / len(ranks)).backward()
            optimizer.step()
        return parameters(embedding)

    compared(run, P=2, algo="allgather", density=1.0)


def test_sharded_parameters_are_refused():
    class DTensor(torch.Tensor):
        pass

    with pytest.raises(TypeError, match="rank 0: params: expected whole tensors on every rank, got a DTensor"):
        SparseSGD([torch.ones(3).as_subclass(DTensor).requires_grad_()])
    with pytest.raises(TypeError, match="expected tensors on the CPU or a CUDA device"):
        SparseSGD([torch.nn.Parameter(torch.empty(3, device="meta"))])
    with pytest.raises(TypeError, match=r"expected floating-point tensors, got torch\.complex64"):
        SparseSGD([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))])


# -- the same on all ranks


@pytest.mark.parametrize("given", ["parameters", "model"])
def test_buffers_are_rank_0s(given):
    def program(comm):
        torch.manual_seed(comm.rank)
        model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)).double()
        model[1].running_mean.fill_(comm.rank)
        model[0].requires_grad_(False)
        params, known = (model.parameters(), None) if given == "parameters" else ([*model[1:].parameters()], model)
        optimizer = SparseSGD(params, 0.1, comm=comm, model=known, verify=1)
        first = float(model[1].running_mean[0])
        train(comm, model, optimizer, range(3))
        return first, bits(model), model[1].running_mean.tolist(), int(model[1].num_batches_tracked)

    results = simulate(P, program).results
    assert {first for first, *_ in results} == {0.0} and len({str(r) for r in results}) == 1
    assert results[0][3] == 3


def test_verify_names_what_differs():
    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, verify=2)
        train(comm, model, optimizer, range(1))
        with torch.no_grad():
            model[2].bias += comm.rank == 1
        with pytest.raises(CommunicationError, match=r"after step 2, got others than rank 0's in '2.bias' on rank 1"):
            train(comm, model, optimizer, range(1, 2))

    simulate(P, program)


def test_timeline():
    timelines = [Timeline(rank) for rank in range(2)]

    def program(comm):
        model = net()
        train(comm, model, SparseSGD(model.parameters(), 0.1, comm=comm, timeline=timelines[comm.rank]), range(3))

    simulate(2, program)
    assert {"bucket 0", "select", "encode", "wait"} <= {name for name, *_ in timelines[1]._events}
    with pytest.raises(TypeError, match="timeline: expected"):
        SparseSGD(net().parameters(), timeline=3)


def test_learning_rates_that_differ_are_an_error_on_all_ranks():
    """ReduceLROnPlateau by each rank's own loss, say."""

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm)
        train(comm, model, optimizer, range(2))
        before = bits(model)
        optimizer.param_groups[0]["lr"] = 0.01 if comm.rank == 1 else 0.1
        with pytest.raises(CommunicationError, match=r"param_groups.*'lr': 0.01.* on rank 1"):
            train(comm, model, optimizer, range(2, 3))
        assert bits(model) == before
        optimizer.param_groups[0]["lr"] = 0.1
        train(comm, model, optimizer, range(2, 3))
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


BAD = [
    ({"lr": -1}, ValueError, "lr: expected at least 0, got -1"),
    ({"lr": "0.1"}, TypeError, "lr: expected a number"),
    ({"momentum": True}, TypeError, "momentum: expected a number"),
    ({"weight_decay": float("nan")}, ValueError, "weight_decay"),
    ({"nesterov": True}, ValueError, "nesterov: expected momentum > 0"),
    ({"nesterov": 1, "momentum": 0.9}, TypeError, "nesterov: expected True or False"),
    ({"fused": "yes"}, TypeError, "fused"),
    ({"differentiable": True}, ValueError, "differentiable: expected False"),
    ({"density": 0}, ValueError, "density: expected in"),
    ({"density": "1%"}, TypeError, "density: expected a number"),
    ({"k": 2.5}, TypeError, "k: expected an integer"),
    ({"algo": "x"}, ValueError, "algo: expected one of"),
    ({"format": "x"}, ValueError, "format"),
    ({"value_dtype": "int8"}, ValueError, "value_dtype: expected one of"),
    ({"model": "net"}, TypeError, "model: expected a torch.nn.Module"),
    ({"verify": -1}, ValueError, "verify: expected at least 0"),
    ({"verify": 1.5}, TypeError, "verify: expected an integer"),
    ({"timeout": 0}, ValueError, "timeout: expected more than 0 seconds"),
    ({"timeout": "5"}, TypeError, "timeout: expected seconds"),
    ({"params": []}, ValueError, "empty parameter list"),
    ({"params": [1]}, TypeError, "can only optimize Tensors"),
    ({"params": [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": "x"}]}, TypeError, "lr: expected a number"),
]


@pytest.mark.parametrize(("options", "kind", "text"), BAD, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_a_bad_argument_on_one_rank_is_refused_on_all(options, kind, text):
    def program(comm):
        arguments = {"params": net().parameters(), "comm": comm, **(options if comm.rank == 1 else {})}
        with pytest.raises(kind, match=f"rank 1: .*{text}"):
            SparseSGD(**arguments)
        model = net()
        train(comm, model, SparseSGD(model.parameters(), comm=comm), range(1))

    simulate(2, program)


def test_arguments_that_are_accepted():
    for options in ({"foreach": True}, {"fused": True}, {"verify": True}, {"verify": False}, {"lr": torch.tensor(0.1)}):
        SparseSGD(net().parameters(), **options)
    SparseSGD(net().named_parameters(), 0.1)
    with pytest.raises(TypeError, match="got a communicator: pass it by name, comm="):
        simulate(1, lambda comm: SparseSGD(net().parameters(), 0.1, comm))
    parallel = torch.nn.parallel.DistributedDataParallel
    with pytest.raises(TypeError, match="rank 0: params: expected a plain model"):
        SparseSGD(net().parameters(), model=parallel.__new__(parallel))
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.deepcopy(SparseSGD(net().parameters()))


def test_models_and_options_that_differ_are_an_error_on_all_ranks():
    def program(comm):
        with pytest.raises(CommunicationError, match=r"parameter 0: .*\(24, 12\).* on rank 0"):
            SparseSGD(net()[0].parameters() if comm.rank == 0 else net()[2].parameters(), comm=comm)
        with pytest.raises(CommunicationError, match="momentum"):
            SparseSGD(net().parameters(), 0.1, 0.9 * comm.rank, comm=comm)

    simulate(2, program)


# -- steps that fail


@pytest.mark.parametrize("number", [1, 3, 5, 8])
@pytest.mark.parametrize("algo", ["allgather", "oktopk", "dense"])
def test_a_failed_step_changes_nothing_and_can_be_made_again(algo, number):
    """A rank's n-th message fails: parameters, residuals, momentum and gradients stay on all ranks."""

    def program(comm, fails):
        model = net()
        model[2].float()
        model[0].float()  # two flat vectors: the first may have been summed when the second fails
        x, y = (t.float() if t.is_floating_point() else t for t in batch(comm.rank, 0))

        def backward(scale):
            optimizer.zero_grad()
            h = model[3](model[2](model[1](model[0](x * scale))))
            torch.nn.functional.cross_entropy(model[4](h.double()), y).backward()

        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, algo=algo, density=0.2)
        for step in range(2):
            backward(1 + step)
            optimizer.step()
        backward(3)
        transport, sent, failed = comm.transport, [], False
        send = transport._isend

        def failing(destination, buffer):
            sent.append(destination)
            if len(sent) == number:
                raise OSError("cable")
            send(destination, buffer)

        def everything():
            state = optimizer.state_dict()
            tensors = [
                *parameters(model),
                *(p.grad.clone() for p in model.parameters()),
                *residuals(optimizer).values(),
            ]
            return tensors + [entry["momentum_buffer"].clone() for entry in state["state"].values()]

        before = everything()
        if fails and comm.rank == 1:
            transport._isend = failing
        try:
            optimizer.step()
        except CommunicationError as error:
            failed = True
            assert str(error) == "rank 1 failed: OSError: cable"
            assert all(map(torch.equal, before, everything()))
            transport._isend = send
            optimizer.step()
        transport._isend = send
        return failed, bits(model), [t.clone() for t in residuals(optimizer).values()]

    results, whole = (simulate(P, partial(program, fails=fails)).results for fails in (True, False))
    assert len({failed for failed, *_ in results}) == 1 and len({b for _, b, _ in results}) == 1
    if number < 8:
        assert results[0][0]
    if algo != "oktopk":  # which finds its thresholds anew after a failure
        assert results[0][1] == whole[0][1]
        for (*_, mine), (*_, theirs) in zip(results, whole, strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("options", [{}, {"algo": "dense"}, {"algo": "allgather", "k": 3}, {"algo": "random"}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(value, options):
    if options.get("algo") == "random":
        options = {"algo": sparsecoll.algorithms.Allgather(selector=sparsecoll.select.RandomK(seed=1))}

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, **options)
        train(comm, model, optimizer, range(2))
        before = bits(model), residuals(optimizer)
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, 2)).backward()
        if comm.rank == 1:
            model[2].weight.grad[3, 4] = value
        with pytest.raises(NonFiniteError, match=r"^rank 1: gradient of '2\.weight': expected finite values, got NaN"):
            optimizer.step()
        after = residuals(optimizer)
        assert bits(model) == before[0] and all(torch.equal(after[n], t) for n, t in before[1].items())
        train(comm, model, optimizer, range(3, 5))
        return bits(model)

    results = simulate(P, program).results
    assert len(set(results)) == 1


def test_a_closure_that_raises_on_one_rank_raises_on_all():
    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm)

        def closure():
            if comm.rank == 1:
                raise RuntimeError("out of memory")
            return loss_of(model, batch(comm.rank, 0))

        with pytest.raises(CommunicationError, match="rank 1 failed: RuntimeError: out of memory"):
            optimizer.step(closure)
        train(comm, model, optimizer, range(1))
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


def test_an_update_that_fails_on_one_rank_is_told_to_the_others():
    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, algo="dense")
        train(comm, model, optimizer, range(2))
        apply, calls = optimizer._apply, []

        def failing(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("no memory")
            apply(*arguments)

        if comm.rank == 1:
            optimizer._apply = failing
            with pytest.raises(MemoryError):
                train(comm, model, optimizer, range(2, 3))
            optimizer._apply = apply
        else:
            train(comm, model, optimizer, range(2, 3))
        with pytest.raises(CommunicationError, match="after step 3, got others than rank 0's"):
            train(comm, model, optimizer, range(3, 4))
        optimizer.move(comm)
        train(comm, model, optimizer, range(4, 6))
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


# -- between back-propagation and step


@pytest.mark.parametrize(("hit", "unscale"), [((), False), ((1,), False), ((1,), True), (range(P), False)], ids=str)
def test_grad_scaler(hit, unscale):
    """All ranks skip the step in which any has an overflow, all scales change alike, and updates have no scale."""

    def run(make, ranks, comm):
        model = net()
        optimizer = make(model.parameters(), 0.2, 0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        scales = []
        for step in range(7):
            optimizer.zero_grad()
            here = [rank for rank in ranks if (rank, step) != (2, 4)]  # that one has no data
            if here:
                loss = mean_loss(model, here, step) * len(here) / len(ranks)
                scaler.scale(loss * float("inf") if step == 3 and set(hit) & set(ranks) else loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
        assert not hasattr(optimizer, "found_inf")
        return [*scales, *parameters(model)]

    compared(run, algo="dense")
    compared(run, algo="oktopk", density=1.0)


def test_grad_scaler_after_a_failed_step():
    """What the scaler sets on the optimizer does not outlive a step that fails, nor divide the next one twice."""

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.2, comm=comm, algo="dense")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        before = parameters(model)
        for fails in (True, False):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch(comm.rank, 0))).backward()
            optimizer.param_groups[0]["lr"] = 0.1 if fails and comm.rank else 0.2
            if fails:
                with pytest.raises(CommunicationError):
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
        return [(a - b) / 0.2 for a, b in zip(before, parameters(model), strict=True)]

    model = net()
    mean_loss(model, range(P), 0).backward()
    for moved in simulate(P, program).results:
        close(moved, [p.grad for p in model.parameters()])


def test_clipping_each_ranks_gradients_is_warned_of_once(caplog):
    def program(comm, clip):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm)
        scaler = torch.amp.GradScaler("cpu", enabled=not clip)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            for part in range(2):
                scaler.scale(loss_of(model, batch(comm.rank, 2 * step + part))).backward()
            scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, lambda comm: program(comm, clip=False))
        assert not caplog.records
        simulate(1, lambda comm: program(comm, clip=True))
        assert not caplog.records
        simulate(P, lambda comm: program(comm, clip=True))
    assert len(caplog.records) == 1 and "changed between backward() and step()" in caplog.text


def test_ranks_that_train_on_the_same_samples_are_warned(caplog):
    def program(comm, same):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(0 if same else comm.rank, step)).backward()
            optimizer.step()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, partial(program, same=False))
        assert not caplog.records
        simulate(P, partial(program, same=True))
    assert len(caplog.records) == 1 and "train on the same samples" in caplog.text


def test_skipped_steps_hooks_and_groups():
    """Steps that all ranks skip, step hooks, a new list of groups."""

    def run(make, ranks, comm):
        model = net()
        optimizer = make(model.parameters(), 0.2, 0.9)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        for step in range(5):
            mean_loss(model, ranks, step).backward()
            if step != 2:
                optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        assert seen == ["before", "after"] * 4
        return parameters(model)

    compared(run, algo="dense")


# -- state


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
        ("old", ValueError, "rank 1: .*got another optimizer's or that of an earlier version"),
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
            elif change == "old":
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
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9 * (comm.size == 2), comm=comm, density=0.1)
        train(comm, model, optimizer, range(3))
        optimizer.zero_grad()
        before = bits(model), residuals(optimizer)
        state = functions.get_optimizer_state_dict(model, optimizer)
        assert bits(model) == before[0]
        assert all(torch.equal(residuals(optimizer)[n], t) for n, t in before[1].items())
        fresh = SparseSGD(other.parameters(), comm=comm)
        functions.set_optimizer_state_dict(other, fresh, state)
        assert fresh.param_groups[0]["lr"] == 0.1
        if comm.size == 2:
            a, b = (o.state[m[2].weight]["momentum_buffer"] for o, m in ((optimizer, model), (fresh, other)))
            assert torch.equal(a, b)

    simulate(2, program)
    simulate(3, program)


# -- several at once, other numbers of batches, other communicators


def test_two_optimizers_on_one_communicator():
    """A generator and a discriminator, of which one has its gradients off in turn."""

    def run(make, ranks, comm):
        first, second = net(), net(1)
        optimizers = [make(m.parameters(), 0.1, 0.9) for m in (first, second)]
        for step in range(5):
            for mine, other, optimizer in ((first, second, optimizers[0]), (second, first, optimizers[1])):
                other.requires_grad_(False)
                optimizer.zero_grad()
                both = [
                    loss_of(mine, batch(rank, step)) + (mine(batch(rank, step)[0]) * other(batch(rank, step)[0])).mean()
                    for rank in ranks
                ]
                (sum(both) / len(ranks)).backward()
                optimizer.step()
                other.requires_grad_(True)
        return parameters(first) + parameters(second)

    compared(run, algo="dense")


@pytest.mark.parametrize("algo", ["dense", "oktopk"])
def test_join(algo):
    """Ranks with 2, 5 and 3 batches: as one process in which missing batches count as zero."""
    counts = (2, 5, 3)
    plain = net()
    inner = torch.optim.SGD(plain.parameters(), 0.2, 0.9)
    for step in range(5):
        inner.zero_grad()
        (sum(loss_of(plain, batch(r, step)) for r in range(P) if step < counts[r]) / P).backward()
        inner.step()

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.2, 0.9, comm=comm, algo=algo, density=1.0)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        with optimizer.join():
            for step in range(counts[comm.rank]):
                train(comm, model, optimizer, [step])
                schedule.step()
        first = parameters(model)
        train(comm, model, optimizer, range(5, 7))
        return first, bits(model)

    results = simulate(P, program).results
    assert len({b for _, b in results}) == 1
    for first, _ in results:
        close(first, parameters(plain))


def test_another_communicator_keeps_residuals_and_levels_the_rest():
    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, density=0.05)
        train(comm, model, optimizer, range(3))
        before = residuals(optimizer)
        if comm.rank == 1:  # one rank has taken a step that the others have not
            optimizer._replica.context.step += 1
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
                    optimizer.state[p]["momentum_buffer"].add_(1)
        optimizer.move(comm)
        kept = all(torch.equal(before[name], t) for name, t in residuals(optimizer).items())
        train(comm, model, optimizer, range(3, 6))
        return kept, bits(model)

    results = simulate(P, program).results
    assert all(kept for kept, _ in results) and len({after for _, after in results}) == 1


def test_one_rank_without_mpirun():
    model = net()
    optimizer = SparseSGD(model.parameters(), 0.1, density=0.05)
    before = bits(model)
    loss_of(model, batch(0, 0)).backward()
    optimizer.step()
    assert bits(model) != before
    kept = sum(int((t != 0).sum()) for t in residuals(optimizer).values())
    assert 0 < kept < sum(p.numel() for p in model.parameters())


def test_torch_tensors_go_through_the_front_door():
    x = torch.tensor([0.0, 3.0, -4.0, 1.0])
    y = simulate(2, lambda comm: sparsecoll.allreduce(comm, x, "oktopk", k=2)).results[0]
    np.testing.assert_array_equal(y.to_dense(), np.array([0, 6, -8, 0], np.float32))
    with pytest.raises(TypeError, match="bfloat16"):
        simulate(1, lambda comm: sparsecoll.allreduce(comm, x.bfloat16(), "oktopk", k=2))
    z = simulate(1, lambda comm: sparsecoll.allreduce(comm, x.to_sparse(), "oktopk", k=2)).results[0]
    assert z.layout == torch.sparse_coo and z.to_dense().tolist() == [0, 3, -4, 0]
