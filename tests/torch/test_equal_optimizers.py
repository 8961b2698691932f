"""Optimizers that differ between ranks, and blocks of join() inside each other, are refused on all ranks."""

import pytest

torch = pytest.importorskip("torch")

from nets import batch, loss_of, net  # noqa: E402

from sparsecoll import CommunicationError, simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer  # noqa: E402


def adamw(params, **options):
    return torch.optim.AdamW(params, 1e-2, **options)


def two_groups(model, at):
    params = list(model.parameters())
    return [{"params": params[:at]}, {"params": params[at:]}]


UNEQUAL = {  # what rank 1 has, and the error
    "order": (lambda model: adamw(reversed(list(model.parameters()))), r"names in param_groups\[0\]"),
    "groups": (lambda model: adamw(two_groups(model, 3)), r"names in param_groups\[0\]"),
}


@pytest.mark.parametrize("name", UNEQUAL)
@pytest.mark.parametrize("wrap", [DistributedOptimizer, LocalOptimizer])
def test_groups_that_differ_between_ranks_are_refused(wrap, name):
    make, text = UNEQUAL[name]

    def program(comm):
        model = net()
        own = make(model) if comm.rank == 1 else adamw(two_groups(model, 2) if name == "groups" else model.parameters())
        with pytest.raises(CommunicationError, match=text):
            wrap(own, model, comm)

    simulate(2, program)


@pytest.mark.parametrize("change", ["weight_decay", "betas", "maximize", "params"])
def test_options_that_change_on_one_rank_are_refused(change):
    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(adamw(model.parameters()), model, comm, "none")
        values = {"weight_decay": 0.5, "betas": (0.5, 0.6), "maximize": True, "params": list(model.parameters())[1:]}
        if comm.rank == 1:
            optimizer.param_groups[0][change] = values[change]
        with pytest.raises(CommunicationError, match=change.replace("params", "number of parameters")):
            loss_of(model, batch(comm.rank, 0)).backward()

    simulate(2, program)


def test_states_that_differ_between_ranks_are_refused():
    def program(comm):
        model = net()
        own = adamw(model.parameters())
        loss_of(model, batch(comm.rank, 0)).backward()
        own.step()
        with pytest.raises(CommunicationError, match="checksum of the optimizer's state"):
            DistributedOptimizer(own, model, comm, "none")
        other = net()
        optimizer = DistributedOptimizer(adamw(other.parameters()), other, comm, "none")
        with pytest.raises(CommunicationError, match="checksum of the optimizer's state"):
            optimizer.load_state_dict(own.state_dict())

    simulate(2, program)


@pytest.mark.parametrize("wrap", [DistributedOptimizer, LocalOptimizer])
def test_a_join_inside_another_is_refused(wrap):
    def program(comm):
        models = [net(0), net(1)]
        first, second = (wrap(adamw(model.parameters()), model, comm, "none") for model in models)
        with first.join(), pytest.raises(RuntimeError, match="join: expected none inside that of another optimizer"):
            second.join().__enter__()
        with first.join():
            pass
        with second.join():
            pass

    simulate(2, program)


@pytest.mark.parametrize("values", [(1.0, 1.0), (1.0, float("nan")), (float("nan"), 0.5), (-1.0, 0.5)])
def test_outer_values_out_of_range_are_refused(values):
    model = net()
    with pytest.raises(ValueError, match=r"outer_(lr|momentum): expected in \[0, "):
        LocalOptimizer(adamw(model.parameters()), model, outer_lr=values[0], outer_momentum=values[1])
