"""DistributedOptimizer: the wrapped optimizer on mean gradients, however a training loop is written."""

import pytest
import torch
from nets import batch, bits, close, loss_of, mean_loss, net, parameters, residuals, train

from sparsecoll import CommunicationError, select, simulate
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer
from sparsecoll.torch.compressors import TopKCompressor

P = 3
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.01, centered=True),
}


@pytest.mark.parametrize("bucket_bytes", [None, 1, 4000])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_compression_it_is_the_optimizer_on_the_mean_gradient(name, bucket_bytes):
    """Two groups, a scheduler, clipping of the mean."""
    make = OPTIMIZERS[name]

    def groups(model):
        return [
            {"params": model[0].parameters(), "lr": 0.03},
            {"params": [*model[2].parameters(), *model[4].parameters()]},
        ]

    def run(model, optimizer, backward):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for step in range(5):
            optimizer.zero_grad()
            backward(model, step)
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
        return parameters(model)

    plain = net()
    expected = run(
        plain,
        make(groups(plain)),
        lambda m, s: (sum(loss_of(m, batch(r, s)) for r in range(P)) / P).backward(),
    )

    def program(comm):
        model = net(seed=comm.rank)  # only rank 0's parameters count
        optimizer = DistributedOptimizer(
            make(groups(model)), model.named_parameters(), comm, "none", bucket_bytes=bucket_bytes
        )
        return run(model, optimizer, lambda m, s: loss_of(m, batch(comm.rank, s)).backward())

    for mine in simulate(P, program).results:
        close(mine, expected)


def test_every_evaluation_of_a_closure_is_a_mean():
    """L-BFGS evaluates several times a step; every evaluation is a mean."""
    plain = net()
    inner = torch.optim.LBFGS(plain.parameters(), 0.1, max_iter=4)

    def closure(model, optimizer, losses):
        optimizer.zero_grad()
        loss = losses()
        loss.backward()
        return loss

    for _ in range(2):
        inner.step(lambda: closure(plain, inner, lambda: sum(loss_of(plain, batch(r, 0)) for r in range(P)) / P))
    expected = parameters(plain)

    def program(comm):
        model = net()
        inner = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, "none")
        for _ in range(2):  # the losses must agree, too: L-BFGS decides by them
            optimizer.step(lambda: closure(model, optimizer, lambda: loss_of(model, batch(comm.rank, 0))))
        return parameters(model), bits(model)

    results = simulate(P, program).results
    assert len({b for _, b in results}) == 1
    close(results[0][0], expected)


def test_unused_and_frozen_parameters():
    """Unused everywhere: untouched, weight decay or not. Unused on some ranks: zeros there. Frozen: left alone."""

    def program(comm):
        some, nowhere, frozen, used = (torch.nn.Parameter(torch.ones(n)) for n in (3, 4, 5, 6))
        frozen.requires_grad_(False)
        named = {"some": some, "nowhere": nowhere, "frozen": frozen, "used": used}
        inner = torch.optim.SGD(named.values(), 1.0, momentum=0.9, weight_decay=0.5)
        optimizer = DistributedOptimizer(inner, named.items(), comm, "none", dense_below=0, bucket_bytes=8)
        for _ in range(3):
            optimizer.zero_grad()
            loss = used.sum() + (some.sum() * 2 if comm.rank == 0 else 0)
            loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in (some, nowhere, frozen, used)], nowhere.grad

    for (some, nowhere, frozen, used), gradient in simulate(2, program).results:
        assert (nowhere == 1).all() and gradient is None and (frozen == 1).all()
        torch.testing.assert_close(some, used[:3])  # the mean gradient is 1 for both


def test_gradients_are_means_in_the_first_back_propagation_of_other_layers():
    def program(comm):
        model = net()
        model[0].requires_grad_(False)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, "none")
        train(comm, model, optimizer, range(2))
        model.requires_grad_(False)[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, 2)).backward()
        return model[0].weight.grad.tolist()

    first, *others = simulate(P, program).results
    assert others == [first] * (P - 1)


def test_sparse_embedding_gradients_and_sparse_adam():
    def program(comm):
        embedding = torch.nn.Embedding(10, 3, sparse=True)
        torch.nn.init.ones_(embedding.weight)
        inner = torch.optim.SparseAdam(embedding.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, embedding.named_parameters(), comm, TopKCompressor(1.0), dense_below=0)
        for _ in range(2):
            optimizer.zero_grad()
            embedding(torch.tensor([comm.rank, comm.rank, 5])).sum().backward()
            optimizer.step()
        return embedding.weight.detach().clone(), embedding.weight.grad

    for weight, gradient in simulate(2, program).results:
        assert gradient.is_sparse and gradient.coalesce().indices().tolist() == [[0, 1, 5]]
        moved = (weight != 1).all(1)
        assert moved.nonzero().view(-1).tolist() == [0, 1, 5]


def test_parameters_of_several_dtypes_have_gradients_of_their_own():
    def program(comm):
        half, single, double = (
            torch.nn.Parameter(torch.ones(4, dtype=d)) for d in (torch.bfloat16, torch.float32, torch.float64)
        )
        named = {"half": half, "single": single, "double": double}
        optimizer = DistributedOptimizer(
            torch.optim.SGD(named.values(), 0.5), named.items(), comm, "none", dense_below=0
        )
        for _ in range(2):
            optimizer.zero_grad()
            ((half.float() + single + double) * (comm.rank + 1)).sum().backward()
            optimizer.step()
        return [p.detach().clone() for p in named.values()], half.grad.dtype

    for tensors, dtype in simulate(3, program).results:
        assert dtype == torch.bfloat16
        assert all((t == -1).all() for t in tensors)  # 1 - 2 * 0.5 * 2


def test_clipping_before_needs_no_overlap():
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 1.0)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, "none", overlap=False)
        before = parameters(model)
        for step in range(2):
            optimizer.zero_grad()
            (100 * loss_of(model, batch(comm.rank, step))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        return sum(float((a - b).square().sum()) for a, b in zip(before, parameters(model), strict=True)) ** 0.5

    assert all(0 < norm <= 0.02 + 1e-9 for norm in simulate(2, program).results)


def test_verify_names_the_first_tensor_that_differs():
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, "none", verify=2)
        train(comm, model, optimizer, range(2))
        if comm.rank == 2:
            with torch.no_grad():
                model[2].bias[3] += 1
        train(comm, model, optimizer, range(1))
        with pytest.raises(CommunicationError, match=r"after step 4.*'2\.bias' on rank 2"):
            train(comm, model, optimizer, range(1))

    simulate(3, program)


@pytest.mark.parametrize("verify", [True, False, 0])
def test_verify_is_a_flag_or_a_number_of_steps(verify):
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        train(comm, model, DistributedOptimizer(inner, model.named_parameters(), comm, verify=verify), range(2))

    simulate(1, program)


def test_ranks_that_disagree_get_the_same_error():
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        density = 0.1 if comm.rank else 0.2
        with pytest.raises(CommunicationError, match=r"compressor\.density: expected the same value") as got:
            method = TopKCompressor(density, "oktopk", select.SampledThreshold())
            DistributedOptimizer(inner, model.named_parameters(), comm, method)
        assert str(got.value).endswith("got '0.2' on rank 0, '0.1' on rank 1")
        with pytest.raises(CommunicationError, match="compressor: expected the same value on all ranks"):
            DistributedOptimizer(inner, model.named_parameters(), comm, "topk" if comm.rank else "qsgd")
        with pytest.raises(CommunicationError, match="parameter 0: expected the same"):
            named = [(f"{comm.rank}.{name}", p) for name, p in model.named_parameters()]
            DistributedOptimizer(inner, named, comm)

    simulate(2, program)


def test_wrong_arguments_are_refused():
    model = net()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="named_parameters: expected all"):
        DistributedOptimizer(inner, [])
    with pytest.raises(ValueError, match="bucket_bytes"):
        DistributedOptimizer(inner, model.named_parameters(), bucket_bytes=0)


def test_added_groups_keep_what_residuals_hold():
    def program(comm):
        model, late = net(), torch.nn.Parameter(torch.full((50,), float(comm.rank)))
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, TopKCompressor(0.05), dense_below=10)
        train(comm, model, optimizer, range(3))
        before = optimizer.state_dict()["sparsecoll"]["tensors"]["residual"]
        optimizer.add_param_group({"params": [late], "lr": 0.25})
        assert (late == 0).all()  # rank 0's
        after = optimizer.state_dict()["sparsecoll"]["tensors"]["residual"]
        assert all(torch.equal(after[name], residual) for name, residual in before.items())
        optimizer.zero_grad()
        (loss_of(model, batch(comm.rank, 3)) + late.sum()).backward()
        optimizer.step()
        return bits(model), float(late.detach().abs().max())

    results = simulate(3, program).results
    assert len(set(results)) == 1 and results[0][1] == 0.25


def test_a_layer_that_joins_the_optimizer_later_has_one_residual():
    """It is known by the model's name already, whether it was frozen until then or not."""

    def program(comm):
        model = net()
        model[0].requires_grad_(False)
        inner = torch.optim.SGD(model[4].parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, TopKCompressor(0.05), dense_below=10)
        train(comm, model, optimizer, range(2))
        waiting = residuals(optimizer)["2.weight"]
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters()}, model.named_parameters())
        optimizer.add_param_group({"params": model[2].parameters()})
        assert torch.equal(residuals(optimizer)["2.weight"], waiting)
        train(comm, model, optimizer, range(2, 4))
        assert set(optimizer.state_dict()["sparsecoll"]["order"]) == {name for name, _ in model.named_parameters()}
        return bits(model)

    assert len(set(simulate(3, program).results)) == 1


@pytest.mark.parametrize("wrapper", [DistributedOptimizer, LocalOptimizer])
@pytest.mark.parametrize("how", ["params", "group"])
def test_a_head_that_is_replaced_again_and_again(wrapper, how):
    """As in continual learning, where each task has a head of its own."""

    def run(make, ranks):
        model = net()
        optimizer = make(torch.optim.SGD(model[:4].parameters(), 0.1), model)
        for task in range(3):
            torch.manual_seed(task)
            model[4] = torch.nn.Linear(64, 3, dtype=torch.float64)
            if how == "params":
                optimizer.param_groups[0]["params"] = list(model.parameters())
            else:
                del optimizer.param_groups[1:]
                optimizer.add_param_group({"params": model[4].parameters()})
            for step in range(2):
                optimizer.zero_grad()
                mean_loss(model, ranks, step).backward()
                optimizer.step()
        return parameters(model)

    expected = run(lambda optimizer, _: optimizer, range(2))
    options = {"every": 1} if wrapper is LocalOptimizer else {}

    def program(comm):
        return run(lambda optimizer, model: wrapper(optimizer, model, comm, "none", **options), [comm.rank])

    for result in simulate(2, program).results:
        close(result, expected)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("how", ["unfreeze", "move", "add", "add known"])
def test_buckets_that_are_made_again_between_backward_and_step(how, taken):
    """Residuals keep what gradients have left there if the step is taken, and are as before if it is skipped."""

    def program(comm):
        a, b = (torch.nn.Parameter(torch.zeros(400), requires_grad=name == "a" or "k" in how) for name in "ab")
        known = {"a": a} if how == "add" else {"a": a, "b": b}
        compressor = TopKCompressor(0.05, algo="allgather")
        inner = torch.optim.SGD([a] if "add" in how else [a, b], 1.0)
        optimizer = DistributedOptimizer(inner, known.items(), comm, compressor, dense_below=0)
        generator = torch.Generator().manual_seed(comm.rank)

        def backward():
            gradient = torch.randn(400, generator=generator)
            ((a + b) * gradient).sum().backward()
            return gradient

        total = backward()
        optimizer.step()
        optimizer.zero_grad()
        given = backward()
        if how == "unfreeze":
            b.requires_grad_(True)
            given += backward()
        elif how == "move":
            optimizer.move(comm.Dup())
        else:
            optimizer.add_param_group({"params": [b]})
        if taken:
            total += given
            optimizer.step()
        optimizer.zero_grad()
        tensors = optimizer.state_dict()["sparsecoll"]["tensors"]
        return a.detach(), total - tensors["residual"]["a"]

    results = simulate(2, program).results
    torch.testing.assert_close(-2 * results[0][0], sum(moved for _, moved in results))


@pytest.mark.parametrize("how", ["thrown away", "zeroed", "kept", "another optimizer", "saved"])
def test_residuals_of_parameters_that_the_optimizer_does_not_have(how):
    """One leaves nothing behind if its gradients are thrown away; added later, it begins as in torch."""

    def program(comm):
        a, b = (torch.nn.Parameter(torch.zeros(400)) for _ in "ab")
        compressor = TopKCompressor(0.05, algo="allgather")
        inner = torch.optim.SGD([a], 1.0)
        optimizer = DistributedOptimizer(inner, [("a", a), ("b", b)], comm, compressor, dense_below=0)
        other = torch.optim.SGD([b], 1.0)
        generator = torch.Generator().manual_seed(comm.rank)
        given = torch.zeros(2, 400)

        def step():
            gradients = torch.randn(2, 400, generator=generator)
            (a * gradients[0] + b * gradients[1]).sum().backward()
            optimizer.step()
            return gradients

        for _ in range(4):
            given += step()
            if how == "another optimizer":
                other.step()
            for p in (a,) if how == "kept" else (a, b):
                p.grad = None if how != "zeroed" else p.grad.zero_()
        if how not in ("kept", "another optimizer"):
            given[1] = 0
        if how == "saved":
            optimizer.zero_grad()
            state = {**optimizer.state_dict(), **{kind: inner.state_dict()[kind] for kind in ("state", "param_groups")}}
            optimizer.load_state_dict(state)
        if how != "another optimizer":
            optimizer.add_param_group({"params": [b]})
        given += step()
        if how == "another optimizer":
            other.step()
        residuals = optimizer.state_dict()["sparsecoll"]["tensors"]["residual"]
        return torch.stack([a.detach(), b.detach()]), given - torch.stack([residuals["a"], residuals["b"]])

    results = simulate(2, program).results
    torch.testing.assert_close(-2 * results[0][0], sum(sent for _, sent in results))


def test_one_rank_without_mpirun_and_close():
    model = net()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    before = bits(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(0, step)).backward()
        optimizer.step()
    assert bits(model) != before
    optimizer.close()
    loss_of(model, batch(0, 0)).backward()
    loss_of(model, batch(0, 1)).backward()  # no hook objects
