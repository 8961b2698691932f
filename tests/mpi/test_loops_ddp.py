"""The hook of DistributedDataParallel, over MPI: what it raises, how a run resumes, and DDP's join()."""

import copy
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from loops_of_models import Shelf
from runs import HOOK, Ledger, Run, alike, bits, draw, net, plain_sgd, train
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

from sparsecoll.errors import CommunicationError, NonFiniteError
from sparsecoll.torch import WarmUp
from sparsecoll.torch.compressors import ACPSGD, RandomKCompressor, TopKCompressor, dgc, efsignsgd, oktopk

pytestmark = [pytest.mark.mpi, pytest.mark.mpich, pytest.mark.usefixtures("process_group")]
TOPK = TopKCompressor(0.1, algo="allgather")
PAGE = Path(__file__).parent.parent.parent / "docs" / "torch.md"


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_nan_on_one_rank_raises_the_same_on_all(comm, options):
    run, last = train(Run(HOOK, comm, net, plain_sgd, TOPK, **options), range(2)), comm.size - 1
    for step in range(2, 20, 2):
        loss = run.loss(step)
        with pytest.raises(NonFiniteError) as raised:
            (loss * float("nan") if comm.rank == last else loss).backward()
        text = str(raised.value)
        assert text.startswith(f"rank {last}: gradient of '") and text.endswith(
            "expected finite values, got NaN or infinity"
        )
        assert set(comm.allgather(text)) == {text}
        run.model.zero_grad()
        train(run, [step + 1])
    assert alike(comm, run.values())


def test_layers_may_be_frozen_after_ddp_was_made(comm):
    """And trained later, from the first back-propagation on."""
    run = Run(HOOK, comm, net, plain_sgd, TOPK, find_unused_parameters=True)
    first = run.module[0]
    for frozen in (True, False, True):
        first.requires_grad_(not frozen)
        before = first.weight.detach().clone()
        train(run, range(2))
        assert torch.equal(first.weight, before) == frozen
        first.weight.grad = first.bias.grad = None
    assert alike(comm, run.values())


def test_nothing_is_lost_while_other_layers_are_trained(comm):
    run = Run(HOOK, comm, net, plain_sgd, TOPK, find_unused_parameters=True)
    ledger = Ledger(run)
    taken = {name: torch.zeros_like(p) for name, p in ledger.named.items()}
    for step, trained in enumerate([run.module[2:], run.module[2:], run.module[:2], run.module[2:], run.module]):
        run.module.requires_grad_(False)
        trained.requires_grad_(True)
        train(run, [step])
        for name, p in ledger.named.items():
            taken[name] += 0 if p.grad is None else p.grad
    expected = ledger._total(ledger.given)
    torch.testing.assert_close(ledger._total(taken) + ledger._total(ledger._residuals()), expected)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("compressor", [TOPK, efsignsgd()], ids=["topk", "efsignsgd"])
@pytest.mark.parametrize("alone", [False, True])
def test_heads_trained_one_after_the_other_in_a_step_lose_nothing(comm, compressor, view, alone):
    """DDP keeps the mean of the first head where no rank uses it in the second back-propagation, or one rank alone."""

    def heads():
        return torch.nn.ModuleDict({"a": net(), "b": net()})

    run = Run(HOOK, comm, heads, plain_sgd, compressor, find_unused_parameters=True, gradient_as_bucket_view=view)
    ledger = Ledger(run)
    for step in range(4):
        run.model.zero_grad()
        ledger.zero()
        for part, head in enumerate("aba"[: 2 + step % 2]):
            other = "a" if alone and part == 1 and comm.rank == run.last else head
            run.loss(step, part, lambda x, rank, head=other: run.module[head](x)).backward()
        run.optimizer.step()
        ledger.settle()
    assert alike(comm, run.values())


@pytest.mark.parametrize("view", [False, True])
def test_means_that_are_clipped_between_two_back_propagations_lose_nothing(comm, view):
    """Also where a mean is zero, since all is in the residual."""

    def heads():
        return torch.nn.ModuleDict({"a": net(), "b": net()})

    few = TopKCompressor(0.02, algo="allgather")
    run, zeros = Run(HOOK, comm, heads, plain_sgd, few, gradient_as_bucket_view=view), 0
    ledger = Ledger(run)
    for step in range(5):
        run.model.zero_grad()
        ledger.zero()
        for part in range(2 + step % 2):
            run.loss(step, part, lambda x, rank: run.module["a"](x) + 1e-3 * run.module["b"](x)).backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)
            zeros += sum(not p.grad.any() for p in run.module["b"].parameters())
        run.optimizer.step()
        ledger.settle()
    assert zeros and alike(comm, run.values())


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize(
    "compressor", [efsignsgd(), RandomKCompressor(0.1), ACPSGD(2), oktopk(), dgc(0.1)], ids=lambda c: c.name
)
def test_a_run_resumes_bit_for_bit_when_ddp_has_rebuilt_its_buckets(comm, compressor, options):
    """They are rebuilt by the function of docs/torch.md; DDP never does with find_unused_parameters=True."""
    (block,) = re.findall(r"^```python\n([^`]*def rebuild[^`]*)^```", PAGE.read_text(), re.M)
    names = {}
    exec(block, names)
    whole = train(Run(HOOK, comm, net, plain_sgd, compressor, **options), range(3))
    model, own = copy.deepcopy((whole.module.state_dict(), whole.state.state_dict()))
    train(whole, range(3, 6))
    again = Run(HOOK, comm, net, plain_sgd, compressor, **options)
    if "find_unused_parameters" not in options:
        x, y = draw(comm.rank, 9)
        names["rebuild"](again.model, again.state, lambda out: (out - y).square().mean(), x, 1 + len(options))
    again.module.load_state_dict(model)
    again.state.load_state_dict(own)
    train(again, range(3, 6))
    assert bits(again.values()) == bits(whole.values()) and alike(comm, again.values())


@pytest.mark.parametrize(
    "compressor", [TOPK, TopKCompressor(WarmUp(0.05, 8), algo="allgather"), ACPSGD(2), "none"], ids=str
)
def test_ddps_join_loses_no_gradient(comm, compressor, caplog):
    """Rank r has 2 + r batches. What waits on a rank that has none is sent with the others' steps, and only once."""
    run = Run(HOOK, comm, net, plain_sgd, compressor, verify=1)
    start, named = run.values(), dict(run.module.named_parameters())
    given = {name: torch.zeros_like(p) for name, p in named.items()}

    def note(name, gradient):
        given[name] += gradient

    for name, p in named.items():
        p.register_hook(partial(note, name))
    for epoch in range(2):
        with run.model.join():
            train(run, range(10 * epoch, 10 * epoch + 2 + comm.rank))
        assert alike(comm, run.values()) and run.state.state_dict()["step"] == (epoch + 1) * (1 + comm.size)
    kept = run.state.state_dict()["tensors"].get("residual", {})
    for name, p in named.items():
        mine = given[name] - kept.get(f"net.{name}", 0)
        total = torch.from_numpy(comm.allreduce(mine.numpy()))
        torch.testing.assert_close((start[name] - p.detach()) / 0.1 * comm.size, total)
    assert not caplog.records


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_step_that_is_skipped_after_two_reductions_leaves_no_trace(comm, skipped):
    """DDP rebuilds its buckets in the second back-propagation, in the middle of the first step."""
    run = Run(HOOK, comm, net, plain_sgd, TOPK)
    ledger = Ledger(run)
    for step in range(3):
        run.optimizer.zero_grad()
        ledger.zero()
        for part in range(2):
            run.loss(step, part).backward()
        if step == skipped:
            run.state.discard()
        else:
            run.optimizer.step()
            ledger.settle()
    assert run.state.state_dict()["step"] == 2


def test_the_step_that_torchs_checkpoints_take_is_no_step(comm):
    """It comes after one that is skipped, whose gradients are gone, and before `discard`."""
    run = Run(HOOK, comm, net, plain_sgd, TOPK)
    ledger = Ledger(run)
    for step in range(4):
        ledger.zero()
        run.loss(step).backward()
        if step % 2:
            run.optimizer.zero_grad()
            get_optimizer_state_dict(run.model, run.optimizer)
            run.state.discard()
        else:
            run.optimizer.step()
            ledger.settle()
            run.optimizer.zero_grad()
    assert run.state.state_dict()["step"] == 2


@pytest.mark.parametrize("layers", [2, 4])
def test_replicas_are_compared_when_zero_has_sent_its_parameters(comm, layers):
    """ZeroRedundancyOptimizer lets each rank step some of the parameters, or none, then sends them."""

    def model():
        return torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(layers)), torch.nn.Linear(6, 1))

    def zero(params):
        return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)

    run = train(Run(HOOK, comm, lambda: model().double(), zero, TOPK, verify=1), range(4))
    assert alike(comm, run.values()) and run.state.state_dict()["step"] == 4
    run.state.verify()
    if comm.rank == 1:
        run.params[-1].data += 1
    if comm.size > 1:
        with pytest.raises(CommunicationError, match=r"after step 4, got others than rank 0's in '.*bias' on rank 1"):
            run.state.verify()


def test_in_ddps_join_no_step_is_discarded_and_errors_reach_all(comm):
    if comm.size == 1:
        return
    run, last = Run(HOOK, comm, net, plain_sgd, TOPK), comm.size - 1
    with pytest.raises(NonFiniteError, match=f"rank {last}: gradient of"), run.model.join():
        for step in range(2 + 2 * comm.rank):
            loss = run.loss(step)
            (loss * float("nan") if step == 1 + 2 * last else loss).backward()
            if step == 2:
                with pytest.raises(RuntimeError, match="has left DDP's join"):
                    run.state.discard()
            run.optimizer.step()


@pytest.mark.parametrize("row_density", [None, 0.05])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_gradients_that_are_rows(comm, options, row_density):
    compressor = replace(TOPK, row_density=row_density)
    run, last = Run(HOOK, comm, Shelf, plain_sgd, compressor, verify=1, **options), comm.size - 1
    ledger = Ledger(run)

    def backward(step, factor=1.0):
        x = torch.randint(0, 40, (6, 3), generator=torch.Generator().manual_seed(10 * comm.rank + step))
        run.optimizer.zero_grad()
        ledger.zero()
        (run.model(x) * 1e-2 * factor).backward()

    for step in range(3):
        backward(step)
        assert run.module.table.weight.grad.is_sparse and run.module.bag.weight.grad.is_sparse
        run.optimizer.step()
        ledger.settle()
    kept = run.state.state_dict()["tensors"]["residual"]
    rows = [] if row_density is None else ["net.bag.weight", "net.table.weight"]
    assert sorted(kept) == sorted([*rows, "net.head.bias", "net.head.weight"])
    assert all(kept[name].is_sparse and kept[name]._nnz() < 40 for name in rows)
    run.module.bag.weight.register_hook(lambda gradient: gradient * (float("nan") if comm.rank == last else 1.0))
    with pytest.raises(NonFiniteError, match=rf"^rank {last}: gradient of 'net.bag.weight': expected finite values"):
        backward(3)
    assert run.module.bag.weight.grad.is_sparse and alike(comm, run.values())


@pytest.mark.parametrize("row_density", [None, 0.05])
def test_rows_in_ddps_join(comm, row_density):
    run = Run(HOOK, comm, Shelf, plain_sgd, replace(TOPK, row_density=row_density))
    with run.model.join():
        for step in range(2 + comm.rank):
            x = torch.randint(0, 40, (6, 3), generator=torch.Generator().manual_seed(10 * comm.rank + step))
            run.optimizer.zero_grad()
            (run.model(x) * 1e-2).backward()
            run.optimizer.step()
    assert alike(comm, run.values())
