"""LocalOptimizer: the mean of what ranks have changed, with any optimizer and compressor."""

import copy

import pytest
import torch
from nets import batch, bits, close, loss_of, net, parameters

from sparsecoll import formats, simulate
from sparsecoll.errors import CommunicationError, NonFiniteError
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, redistribute
from sparsecoll.torch.compressors import QSGD, TopKCompressor

SPARSE = TopKCompressor(0.1, "allgather", format=formats.PackedCodesFormat())


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.01)


def trained(comm, steps=7, compressor="none", make=adamw, **options):
    """The model and the optimizer of a rank after some steps on its own batches."""
    model = net(seed=comm.rank)  # only rank 0's parameters count
    optimizer = LocalOptimizer(make(model), model, comm, compressor, **options)
    go_on(comm, model, optimizer, 0, steps)
    return model, optimizer


def go_on(comm, model, optimizer, start, stop):
    for step in range(start, stop):
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step)).backward()
        optimizer.step()


@pytest.mark.parametrize("P", [1, 3])
def test_without_compression_it_is_the_mean_of_the_parameters(P):
    def alone():
        models = [net() for _ in range(P)]
        optimizers = [adamw(model) for model in models]
        for step in range(7):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                loss_of(model, batch(rank, step)).backward()
                optimizer.step()
            if step in (2, 5, 6):
                with torch.no_grad():
                    for ps in zip(*(model.parameters() for model in models), strict=True):
                        mean = sum(p.clone() for p in ps) / P
                        for p in ps:
                            p.copy_(mean)
        return parameters(models[0])

    def program(comm):
        model, optimizer = trained(comm, every=3)
        optimizer.synchronize()
        optimizer.synchronize()  # nothing is left to do
        return parameters(model)

    for result in simulate(P, program).results:
        close(result, alone())


def test_a_period_of_one_step_of_sgd_is_the_step_on_the_mean_gradient():
    def sgd(model):
        return torch.optim.SGD(model.parameters(), 0.1)

    plain = net()
    optimizer = sgd(plain)
    for step in range(4):
        optimizer.zero_grad()
        (sum(loss_of(plain, batch(r, step)) for r in range(3)) / 3).backward()
        optimizer.step()
    for result in simulate(3, lambda comm: parameters(trained(comm, 4, make=sgd, every=1)[0])).results:
        close(result, parameters(plain))


@pytest.mark.parametrize("compressor", [SPARSE, QSGD(4, feedback=True)], ids=["4 bits", "qsgd"])
def test_ranks_have_the_same_bits_after_a_mean_and_resume_with_them(compressor):
    options = {"compressor": compressor, "every": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "dense_below": 0}

    def program(comm):
        model, optimizer = trained(comm, 5, verify=1, **options)
        saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        go_on(comm, model, optimizer, 5, 8)
        again, other = trained(comm, 2, **options)  # other parameters, moments and residuals
        again.load_state_dict(weights)
        other.load_state_dict(saved)
        go_on(comm, again, other, 5, 8)
        return bits(model), bits(again), saved

    results = simulate(3, program).results
    assert len({pair[0] for pair in results}) == 1 and all(a == b for a, b, _ in results)
    states = [saved for *_, saved in results]

    def of_two(comm):
        model, optimizer = trained(comm, 0, **options)
        optimizer.load_state_dict(redistribute(copy.deepcopy(states), comm.rank, 2))
        go_on(comm, model, optimizer, 5, 6)
        with pytest.raises(CommunicationError, match="redistribute"):
            optimizer.load_state_dict(states[0])
        return bits(model)

    assert len(set(simulate(2, of_two).results)) == 1


@pytest.mark.parametrize("key", ["steps", "own", "shared", "outer", "sparsecoll"])
def test_a_state_that_lacks_a_part_is_refused_by_its_name(key):
    def program(comm):
        _, optimizer = trained(comm, 2, every=2)
        saved = optimizer.state_dict()
        del (saved if key in saved else saved["sparsecoll_local"])[key]
        with pytest.raises(ValueError, match=f"expected that of LocalOptimizer, got one without '{key}'"):
            optimizer.load_state_dict(saved)
        saved = optimizer.state_dict()
        saved["sparsecoll_local"]["shared"]["other"] = torch.zeros(1)
        with pytest.raises(ValueError, match="expected names of parameters, got 'other'"):
            optimizer.load_state_dict(saved)

    simulate(2, program)


def test_residuals_of_gradients_and_those_of_changes_do_not_take_each_others_place():
    def program(comm):
        optimizer = trained(comm, 2, SPARSE, every=2, dense_below=0)[1]
        other = net()
        other = DistributedOptimizer(adamw(other), other.named_parameters(), comm, SPARSE, dense_below=0)
        for one, state in ((optimizer, other.state_dict()), (other, optimizer.state_dict())):
            with pytest.raises(ValueError, match="expected residuals of"):
                one.load_state_dict(state)
        plain = {name: part for name, part in other.state_dict().items() if not name.startswith("sparsecoll")}
        optimizer.load_state_dict(plain)

    simulate(2, program)


def test_steps_of_the_optimizer_inside_and_models_converted_later_are_refused():
    def program(comm):
        model, optimizer = trained(comm, 2, every=2)
        with pytest.raises(RuntimeError, match=r"call LocalOptimizer\.step"):
            optimizer.optimizer.step()
        model.float()
        with pytest.raises(ValueError, match=r"'0.weight': expected .* torch.float64.*, got .* torch.float32"):
            optimizer.step()
        optimizer = trained(comm, 2, every=2)[1]
        optimizer.close()
        optimizer.optimizer.step()

    simulate(2, program)


def test_parameters_loaded_between_means_are_the_new_start():
    def program(comm):
        model, optimizer = trained(comm, 4, every=2)
        model.load_state_dict(net(seed=9).state_dict())
        optimizer.load_state_dict(adamw(model).state_dict())  # of a plain optimizer
        start = parameters(model)
        go_on(comm, model, optimizer, 0, 2)
        return start, parameters(model)

    for start, end in simulate(2, program).results:
        assert max((a - b).abs().max() for a, b in zip(start, end, strict=True)) < 0.05


@pytest.mark.parametrize("compressor", ["topk", "none", "fp16", "free", "chunktopk"])
def test_nan_on_one_rank_fails_on_all_ranks_changes_nothing_and_names_the_cure(compressor):
    def program(comm):
        model, optimizer = trained(comm, 3, compressor, every=4, dense_below=0)
        kept = parameters(model)
        if comm.rank == 1:
            with torch.no_grad():
                model[0].bias.fill_(float("nan"))
        with pytest.raises(NonFiniteError, match=r"rank 1: change of parameter '0\.bias': .* discard\(\) on all"):
            optimizer.synchronize()
        with torch.no_grad():
            for p, old in zip(model.parameters(), kept, strict=True):
                p.copy_(old)
        optimizer.synchronize()
        return bits(model)

    assert len(set(simulate(3, program).results)) == 1 + 2 * (compressor == "free")


def test_a_mean_that_overflows_is_refused():
    def program(comm):
        model, optimizer = trained(comm, 1, "fp16", every=4, dense_below=0)
        with torch.no_grad():
            model[0].bias[3] = 1e6
        with pytest.raises(NonFiniteError, match=r"change of parameter '0\.bias': expected a finite mean"):
            optimizer.synchronize()
        optimizer.discard()
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


def test_wrong_options_and_scalers_are_refused_on_all_ranks():
    def program(comm):
        model = net()
        for options, error in (({"every": 0}, ValueError), ({"outer_momentum": -1}, ValueError)):
            with pytest.raises(error):
                LocalOptimizer(adamw(model), model, comm, **options)
        with pytest.raises(ValueError, match="all of the optimizer's parameters"):
            LocalOptimizer(adamw(model), list(model.named_parameters())[1:], comm)
        optimizer = LocalOptimizer(adamw(model), model, comm)
        with pytest.raises(RuntimeError, match="bfloat16"):
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(loss_of(model, batch(0, 0))).backward()
            scaler.step(optimizer)
        with pytest.raises(CommunicationError, match="every"):
            LocalOptimizer(adamw(model), model, comm, every=1 + comm.rank)

    simulate(2, program)


@pytest.mark.parametrize("before", [0, 1])
def test_a_group_that_is_added_is_shared_too(before):
    def program(comm):
        model, optimizer = trained(comm, before, every=3)
        extra = torch.nn.Parameter(torch.full((5,), float(comm.rank)))
        optimizer.add_param_group({"params": [extra], "lr": 0.1}, [("extra", extra)])
        assert extra.tolist() == [0.0] * 5  # rank 0's
        for step in range(before, 3):
            optimizer.zero_grad()
            (loss_of(model, batch(comm.rank, step)) + (comm.rank + 1) * extra.sum()).backward()
            optimizer.step()
        assert extra.abs().min() > 0
        return bits(model), extra.tolist()

    assert len({repr(result) for result in simulate(3, program).results}) == 1


def test_two_optimizers_of_one_model_leave_each_others_parameters_alone():
    """As in a GAN: each is given the whole model, and means are taken in the middle of the other's rounds."""

    def run(comm, whole):
        model = net(seed=comm.rank)
        halves = model[:2], model[2:]
        optimizers = [
            LocalOptimizer(adamw(half), model if whole else half, comm, every=every)
            for half, every in zip(halves, (3, 4), strict=True)
        ]
        for step in range(8):
            for optimizer in optimizers:
                model.zero_grad()
                loss_of(model, batch(comm.rank, step)).backward()
                optimizer.step()
        for optimizer in optimizers:
            optimizer.synchronize()
        return bits(model)

    def program(comm):
        model = net(seed=comm.rank)
        LocalOptimizer(adamw(model[:2]), model, comm)
        assert bits(model) == bits(net(0))  # the others begin with rank 0's values, too
        return run(comm, True), run(comm, False)

    assert len({text for pair in simulate(2, program).results for text in pair}) == 1


def test_a_layer_that_joins_the_optimizer_later_keeps_its_name():
    def program(comm):
        model = net(seed=comm.rank)
        optimizer = LocalOptimizer(adamw(model[4]), model, comm, every=2)
        optimizer.add_param_group({"params": model[2].parameters()})
        optimizer.optimizer.add_param_group({"params": model[0].parameters()})
        go_on(comm, model, optimizer, 0, 2)
        assert set(optimizer.state_dict()["sparsecoll"]["order"]) == {name for name, _ in model.named_parameters()}
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("in_optimizer", [False, True])
def test_frozen_parameters_that_the_user_moves_stay_where_they_are(in_optimizer):
    """As those of a teacher that follows its student."""

    def program(comm):
        model, others = net(seed=comm.rank), net(seed=9).requires_grad_(False)
        model.register_module("teacher", others[0])
        stepped = model.parameters() if in_optimizer else model[:5].parameters()
        optimizer = LocalOptimizer(torch.optim.SGD(stepped, 0.1), model, comm, every=2, verify=1)
        expected = others[0].weight.clone()
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model[:5], batch(comm.rank, step)).backward()
            optimizer.step()
            others[0].weight.lerp_(model[0].weight.detach(), 0.1)
            expected.lerp_(model[0].weight.detach(), 0.1)
        assert torch.equal(others[0].weight, expected)
        return bits(model[:5]), bits(others[0])

    (student, teacher), (same, other) = simulate(2, program).results
    assert student == same and teacher != other


def test_a_frozen_layer_that_moves_by_its_momentum_moves_alike_on_all_ranks():
    """Its gradient is zero, not None."""

    def program(comm):
        model = net()
        optimizer = LocalOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model, comm, every=4)
        for step in range(13):
            optimizer.zero_grad(set_to_none=False)
            if step == 5:
                model[0].requires_grad_(False)
                before = model[0].weight.clone()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
        optimizer.synchronize()
        assert not torch.equal(model[0].weight, before)
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("resumed", [False, True])
def test_what_a_layer_has_learned_before_it_is_frozen_takes_part_in_the_next_mean(resumed):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), 0.1)

    def program(comm):
        model, optimizer = trained(comm, 4, make=sgd, every=3)
        if resumed:
            saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
            model, optimizer = trained(comm, 2, make=sgd, every=3)
            model.load_state_dict(weights)
            optimizer.load_state_dict(saved)
        model[0].requires_grad_(False)
        mine = model[0].weight.clone()
        go_on(comm, model, optimizer, 4, 6)
        mean, first = model[0].weight.clone(), bits(model)
        go_on(comm, model, optimizer, 6, 9)
        assert torch.equal(mean, model[0].weight)
        model[0].requires_grad_(True)
        go_on(comm, model, optimizer, 9, 12)
        assert not torch.equal(mean, model[0].weight)
        return mine, mean, first, bits(model)

    (mine, mean, *rest), (other, _, *same) = simulate(2, program).results
    assert rest == same
    close([mean], [(mine + other) / 2])
