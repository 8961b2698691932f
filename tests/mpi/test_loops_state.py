"""Saved state, over MPI: what is taken, what is refused on all ranks alike, and runs that go on bit for bit."""

import copy

import pytest

torch = pytest.importorskip("torch")

from loops_of_steps import Raise  # noqa: E402
from runs import HOOK, LOCAL, OPTIONS, OVERLAP, Run, alike, bits, draw, net, plain_sgd, sgd, train  # noqa: E402

from sparsecoll.torch import DistributedOptimizer, HookState, comm_hook, redistribute  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor, oktopk  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.mpich, pytest.mark.usefixtures("process_group")]
TOPK = TopKCompressor(0.1, algo="allgather")


def raised(comm, call):
    """The text of what `call` raises: on all ranks the same."""
    text = None
    try:
        call()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    assert len(set(comm.allgather(text))) == 1, comm.allgather(text)
    return text or ""


def adam(params):
    return torch.optim.AdamW(params, 0.01)


@pytest.mark.parametrize("way", [OVERLAP, LOCAL, HOOK])
@pytest.mark.parametrize("inner", [sgd, adam])
def test_a_resumed_run_is_the_same_bit_for_bit(comm, way, inner):
    """Also of a run that saves in odd moments: after backward, in the middle of an accumulation, after a skip."""
    options = {"bucket_cap_mb": 25} if way == HOOK else {}  # else DDP cuts other buckets in its first step
    whole = train(Run(way, comm, net, inner, TOPK, **options), range(7))
    half = train(Run(way, comm, net, inner, TOPK, **options), range(4))
    model = copy.deepcopy(half.module.state_dict())
    states = []

    def save():
        own = half.state.state_dict() if way == HOOK else None
        states.append(copy.deepcopy((half.optimizer.state_dict(), own)))

    save()
    half.optimizer.zero_grad()
    with half.no_sync():
        half.loss(4).backward()
    save()
    half.loss(4).backward()
    save()
    half.optimizer.zero_grad()
    save()
    for state, own in states:
        again = Run(way, comm, net, inner, TOPK, **options)
        again.module.load_state_dict(model)
        again.optimizer.load_state_dict(state)
        if way == HOOK:
            again.state.load_state_dict(own)
        train(again, range(4, 7))
        assert bits(again.values()) == bits(whole.values()) and alike(comm, again.values())
        again.close()


def test_loading_the_file_of_rank_0_raises_on_all_ranks(comm):
    run = train(Run(OVERLAP, comm, net, sgd, TOPK), range(2))
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))  # the same call, which goes well
    state = comm.bcast(run.optimizer.state_dict())
    text = raised(comm, lambda: run.optimizer.load_state_dict(state))
    if comm.size > 1:
        assert "rank 1: state_dict: expected the one of rank 1" in text and "file that this rank saved" in text
    train(run, range(2, 4))
    assert alike(comm, run.values())
    hook = train(Run(HOOK, comm, net, sgd, TOPK), range(2))
    hook.state.load_state_dict(copy.deepcopy(hook.state.state_dict()))
    text = raised(comm, lambda: hook.state.load_state_dict(comm.bcast(hook.state.state_dict())))
    assert comm.size == 1 or "rank 1: state_dict: expected the one of rank 1" in text
    run.close()


@pytest.mark.parametrize("way", [OVERLAP, HOOK])
def test_state_that_does_not_fit_is_refused_on_all_ranks(comm, way):
    """Of another number of ranks, another compressor, another model, other shapes; wrong on the last rank only."""
    run = train(Run(way, comm, net, plain_sgd, TOPK), range(2))
    last = comm.rank == comm.size - 1

    def load(change):
        state = copy.deepcopy(run.state.state_dict() if way == HOOK else run.optimizer.state_dict())
        if last:
            change(state if way == HOOK else state["sparsecoll"])
        return raised(comm, lambda: (run.state if way == HOOK else run.optimizer).load_state_dict(state))

    prefix = "net." if way == HOOK else ""
    residual = "residual"
    assert "redistribute" in load(lambda s: s.update(size=comm.size + 1))
    assert "compressor" in load(lambda s: s.update(compressor="powersgd(rank=4)"))
    assert "names of parameters" in load(lambda s: s["tensors"][residual].update(other=torch.zeros(3)))
    name = f"{prefix}2.weight"
    assert "expected shape" in load(lambda s: s["tensors"][residual].update({name: torch.zeros(1)}))
    train(run, range(2, 4))
    assert alike(comm, run.values())
    run.close()


def test_redistributed_state_moves_parameters_as_far(comm):
    """Residuals of P ranks, made those of P + 1, are worth the same update: their mean."""
    run = train(Run(OVERLAP, comm, net, plain_sgd, TOPK), range(3))
    states = comm.allgather(run.optimizer.state_dict())
    run.close()
    for size in (1, comm.size + 1):
        new = [redistribute(states, rank, size)["sparsecoll"]["tensors"]["residual"] for rank in range(size)]
        for name in new[0]:
            old = sum(state["sparsecoll"]["tensors"]["residual"][name] for state in states) / comm.size
            torch.testing.assert_close(sum(tensors[name] for tensors in new) / size, old)


def test_plain_state_goes_in_and_out(comm):
    """A plain optimizer's state_dict is taken, and a plain optimizer takes the wrapper's."""
    module = net()
    plain = adam(module.parameters())
    x, y = draw(0, 0)
    torch.nn.functional.mse_loss(module(x), y).backward()
    plain.step()
    run = Run(OVERLAP, comm, net, adam, TOPK)
    run.optimizer.load_state_dict(comm.bcast(plain.state_dict()))
    train(run, range(2))
    assert alike(comm, run.values())
    assert run.optimizer.state_dict()["state"][0]["step"] == 3
    plain.load_state_dict(run.optimizer.state_dict())
    assert plain.state_dict()["state"][0]["step"] == 3
    run.close()


def test_the_helpers_of_torch_distributed_checkpoint(comm):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    run = train(Run(OVERLAP, comm, net, adam), range(2))
    state = get_optimizer_state_dict(run.module, run.optimizer)
    assert "0.weight" in state["state"]
    again = Run(OVERLAP, comm, net, adam)
    again.module.load_state_dict(run.module.state_dict())
    set_optimizer_state_dict(again.module, again.optimizer, copy.deepcopy(state))
    train(run, range(2, 4))
    train(again, range(2, 4))
    assert bits(run.values()) == bits(again.values())
    run.close()
    again.close()


def test_state_in_the_middle_of_back_propagation_is_refused(comm):
    run = train(Run(OVERLAP, comm, net, sgd, TOPK), range(2))
    texts = []

    def hook(_):
        try:
            run.optimizer.state_dict()
        except RuntimeError as error:
            texts.append(str(error))

    handle = run.params[0].register_post_accumulate_grad_hook(hook)
    train(run, [2])
    handle.remove()
    assert texts and "call state_dict() after back-propagation" in texts[0]
    run.close()


def test_state_after_a_back_propagation_that_was_broken_off(comm):
    """zero_grad() has thrown the step away: the state is that of the last one."""
    run = train(Run(OVERLAP, comm, net, sgd, TOPK), range(2))
    before = copy.deepcopy(run.optimizer.state_dict()["sparsecoll"]["tensors"]["residual"])

    def forward(x, rank):
        return run.module[2:](Raise.apply(run.module[:2](x)))

    with pytest.raises(MemoryError):
        run.loss(2, forward=forward).backward()
    with pytest.raises(RuntimeError, match="after back-propagation, not while"):
        run.optimizer.state_dict()
    run.optimizer.zero_grad()
    assert bits(run.optimizer.state_dict()["sparsecoll"]["tensors"]["residual"]) == bits(before)
    train(run, [3])
    assert alike(comm, run.values())
    run.close()


def test_thresholds_and_boundaries_go_on(comm):
    whole = train(Run(OVERLAP, comm, net, sgd, oktopk(0.1)), range(8))
    half = train(Run(OVERLAP, comm, net, sgd, oktopk(0.1)), range(5))
    again = Run(OVERLAP, comm, net, sgd, oktopk(0.1))
    again.module.load_state_dict(half.module.state_dict())
    again.optimizer.load_state_dict(half.optimizer.state_dict())
    train(again, range(5, 8))
    assert bits(again.values()) == bits(whole.values())


def test_the_hook_refuses_a_group_of_another_size(comm, mpi):
    if comm.size > 1:
        with pytest.raises(ValueError, match=f"expected the {comm.size} ranks of DDP's process group"):
            HookState(mpi.COMM_SELF, "topk")


def test_the_hook_needs_the_models_names_to_save_and_load_its_state(comm, caplog):
    def saved(with_names):
        parallel = torch.nn.parallel.DistributedDataParallel(net())
        state = HookState(comm, TopKCompressor(0.1, algo="allgather"), parallel if with_names else ())
        parallel.register_comm_hook(state, comm_hook)
        parallel(draw(comm.rank, 0)[0]).sum().backward()
        return state, state.state_dict()

    named, names = saved(True)
    assert not caplog.records
    named.load_state_dict(names)
    _, numbers = saved(False)
    assert len(caplog.records) == (comm.rank == 0)
    for state, other in ((named, numbers), (HookState(comm, TopKCompressor(0.1, algo="allgather")), names)):
        with pytest.raises(ValueError, match=r"expected names of parameters, got .*: pass the model to HookState"):
            state.load_state_dict(other)


def test_options_are_those_of_all_ranks(comm):
    """What is wrong on one rank is raised on all."""
    last = comm.rank == comm.size - 1
    wrong = [
        ({"bucket_bytes": 0}, "bucket_bytes: expected at least 1"),
        ({"bucket_bytes": "25MB"}, "bucket_bytes: expected an integer"),
        ({"verify": -1}, "verify: expected at least 0"),
        ({"timeout": 0}, "timeout: expected seconds above 0"),
        ({"timeout": "5"}, "timeout: expected seconds"),
        ({"dense_below": 0.5}, "dense_below: expected an integer"),
        ({"overlap": 1}, "overlap: expected True or False"),
        ({"compressor": "topkk"}, "compressor: expected one of"),
        ({"compressor": 3}, "compressor: expected a name"),
    ]
    for options, expected in wrong:
        module = net()
        text = raised(
            comm,
            lambda m=module, o=options: DistributedOptimizer(
                sgd(m.parameters()), m, comm, **{**OPTIONS, **(o if last else {})}
            ),
        )
        assert expected in text and f"rank {comm.size - 1}: " in text
    module = net()
    named = list(module.named_parameters())[last:]
    text = raised(comm, lambda: DistributedOptimizer(sgd(module.parameters()), named, comm))
    assert "expected all of the optimizer's parameters" in text
    text = raised(comm, lambda: DistributedOptimizer(sgd(module.parameters()), module.parameters(), comm))
    assert "(name, parameter) pairs" in text
    other = torch.nn.Linear(6, 5 if last and comm.size > 1 else 4)
    text = raised(comm, lambda: DistributedOptimizer(sgd(other.parameters()), other, comm).close())
    assert comm.size == 1 or ("weight" in text and len(text) < 1000)
