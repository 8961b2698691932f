"""Loops with every compressor, over MPI: the same bits, no gradient lost, skipped steps without a trace."""

import pytest

torch = pytest.importorskip("torch")

from loops_of_backward import two_heads  # noqa: E402
from loops_of_models import Words  # noqa: E402
from runs import HOOK, LOCAL, OVERLAP, TIMEOUT, Ledger, Run, alike, bits, in_turn, net, plain_sgd, train  # noqa: E402

import sparsecoll  # noqa: E402
from sparsecoll.torch import COMPRESSORS, DistributedOptimizer  # noqa: E402
from sparsecoll.torch.compressors import (  # noqa: E402
    COVAP,
    DRAGONN,
    QSGD,
    PowerSGD,
    TopKCompressor,
    as_compressor,
    dgc,
    nesterovtopk,
    oktopk,
    sgdtopk,
)

pytestmark = [pytest.mark.mpi, pytest.mark.mpich, pytest.mark.usefixtures("process_group")]
MADE = {"covap": COVAP(2, start=1.0), "dgc": dgc(momentum=0.0), "qsgd": QSGD(4, feedback=True)} | {
    "topk": TopKCompressor(0.1, algo="allgather"),
    "sgdtopk": sgdtopk(0.1, momentum=0.0),
    "nesterovtopk": nesterovtopk(0.1, momentum=0.0, nesterov=False),
    "dragonn": DRAGONN(0.1, selective=False),
    "oktopk": oktopk(0.1),
}
COMPRESSED = {name: MADE.get(name) or as_compressor(name) for name in COMPRESSORS if name != "free"}
CONSERVING = {name: compressor for name, compressor in COMPRESSED.items() if name != "fp16"}


def head(step, rank, last):
    """Layers are used on all ranks, in turn, on one rank only, and on none."""
    return "b" if (step % 4 == 1) or (step % 4 == 2 and rank == last) else "a"


@pytest.mark.parametrize(("way", "name"), [*in_turn((n, [OVERLAP, LOCAL, HOOK]) for n in CONSERVING), (HOOK, "covap")])
def test_layers_in_turn_lose_nothing(comm, way, name):
    options = {"find_unused_parameters": True} if way == HOOK else {}
    run = Run(way, comm, two_heads, plain_sgd, CONSERVING[name], **options)
    ledger = Ledger(run)
    for step in range(8):
        run.optimizer.zero_grad()
        ledger.zero()
        run.loss(
            step, forward=lambda x, rank, s=step: run.module["out"](run.module[head(s, rank, run.last)](x))
        ).backward()
        run.optimizer.step()
        ledger.settle()
    run.close()
    assert ledger.steps == 8 and alike(comm, run.values())


def skipping(run, how, skipped):
    """Ten batches; those that are skipped leave no trace."""
    for step in range(10):
        skip = step % 3 == 1
        if skip and not skipped:
            continue
        run.optimizer.zero_grad()
        run.loss(step).backward()
        if how == "two backwards":
            run.loss(step, 1).backward()
        if how == "synchronized":
            run.synchronize()
        if skip:
            if how == "model.zero_grad":
                run.model.zero_grad()
            elif run.way == HOOK:
                run.state.discard()
            else:
                run.optimizer.zero_grad()
            continue
        run.optimizer.step()
    run.close()
    return run


EXACT = ["none", "topk", "efsignsgd", "qsgd", "powersgd", "acpsgd", "covap"]  # others count their calls


HOWS = ["zero_grad", "model.zero_grad", "synchronized", "two backwards"]


@pytest.mark.parametrize(("how", "name"), in_turn((name, HOWS) for name in EXACT))
def test_a_skipped_step_leaves_no_trace(comm, name, how):
    runs = [skipping(Run(OVERLAP, comm, net, plain_sgd, CONSERVING[name]), how, skipped) for skipped in (True, False)]
    states = [run.optimizer.state_dict()["sparsecoll"]["tensors"] for run in runs]
    assert bits(runs[0].values()) == bits(runs[1].values()) and alike(comm, runs[0].values())
    for kind in states[0]:
        assert bits(states[0][kind]) == bits(states[1][kind]), kind


@pytest.mark.parametrize("name", ["topk", "efsignsgd", "powersgd"])
def test_a_skipped_step_of_the_hook_leaves_no_trace(comm, name):
    runs = [
        skipping(Run(HOOK, comm, net, plain_sgd, CONSERVING[name]), "discard", skipped) for skipped in (True, False)
    ]
    assert bits(runs[0].values()) == bits(runs[1].values()) and alike(comm, runs[0].values())
    states = [run.state.state_dict()["tensors"]["residual"] for run in runs]
    assert bits(states[0]) == bits(states[1])


@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_synchronize_after_backward_changes_nothing(comm, name):
    def train(synchronize):
        run = Run(OVERLAP, comm, net, plain_sgd, COMPRESSED[name])
        for step in range(4):
            run.optimizer.zero_grad()
            run.loss(step).backward()
            messages = run.optimizer.traffic.total.messages_sent
            if synchronize:
                run.optimizer.synchronize()
                assert run.optimizer.traffic.total.messages_sent == messages
            run.optimizer.step()
        run.close()
        return bits(run.values())

    assert train(True) == train(False)


def test_a_gradient_that_is_taken_away_takes_nothing_with_it(comm):
    """Of a layer whose gradients are set to None before step() the residual is what it was."""
    run = Run(OVERLAP, comm, net, plain_sgd, COMPRESSED["topk"])
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        before = run.optimizer.state_dict()["sparsecoll"]["tensors"].get("residual", {})
        if step == 3:
            run.module[2].weight.grad = None
        run.optimizer.step()
    after = run.optimizer.state_dict()["sparsecoll"]["tensors"]["residual"]
    run.close()
    assert torch.equal(before["2.weight"], after["2.weight"]) and before["2.weight"].any()
    assert not torch.equal(before["0.weight"], after["0.weight"]) or comm.size == 1


@pytest.mark.parametrize(("phase", "name"), in_turn((name, ["compress", "update"]) for name in CONSERVING))
def test_a_compressor_that_fails_on_one_rank_fails_on_all_and_loses_nothing(comm, name, phase, monkeypatch):
    run = Run(OVERLAP, comm, net, plain_sgd, CONSERVING[name])
    ledger, failed = Ledger(run), 0
    kind = type(CONSERVING[name])
    original = getattr(kind, phase)

    def fails(self, *arguments):
        if bad and self.layout.index == 1:
            raise MemoryError(phase)
        return original(self, *arguments)

    monkeypatch.setattr(kind, phase, fails)
    for step in range(7):
        bad = step in (0, 3, 4) and comm.rank == comm.size - 1
        run.optimizer.zero_grad()
        ledger.zero()
        try:
            run.loss(step).backward()
        except sparsecoll.CommunicationError as error:
            assert f"rank {comm.size - 1} failed: MemoryError: {phase}" in str(error)
            failed += 1
            if step == 3:
                continue  # step 0 and 4: tried again
            bad = False
            run.optimizer.zero_grad()
            ledger.zero()
            run.loss(step).backward()
        run.optimizer.step()
        ledger.settle()
    run.close()
    assert failed == 3 and ledger.steps == 6 and alike(comm, run.values())


@pytest.mark.parametrize("name", COMPRESSED)
def test_nan_on_one_rank(comm, name):
    """Gradients are NaN on all ranks, and step() raises on all; what waits is unspoilt, and training goes on."""
    run, finite = Run(OVERLAP, comm, net, plain_sgd, COMPRESSED[name]), 0
    for step in range(5):
        run.optimizer.zero_grad()
        loss = run.loss(step)
        bad = step in (0, 2)
        (loss * float("nan") if bad and comm.rank == run.last else loss).backward()
        if not bad or name in ("none", "fp16"):
            finite += all(p.grad.isfinite().all() for p in run.params)
            if bad:
                assert any(p.grad.isnan().any() for p in run.params)
                continue
            run.optimizer.step()
            continue
        assert all(p.grad.isnan().all() for p in run.params)
        with pytest.raises(sparsecoll.NonFiniteError, match=rf"rank {run.last}: gradient of '"):
            run.optimizer.step()
    run.close()
    assert finite == 3 and alike(comm, run.values())
    assert all(p.isfinite().all() for p in run.params)


@pytest.mark.parametrize("row_density", [None, 0.1])
def test_sparse_gradients_under_topk(comm, row_density):
    run = Run(
        OVERLAP, comm, Words, plain_sgd, TopKCompressor(0.2, algo="allgather", row_density=row_density), dense_below=10
    )
    ledger = Ledger(run)
    for step in range(5):
        run.optimizer.zero_grad()
        ledger.zero()
        if comm.rank != step % comm.size or comm.size == 1:
            run.model(
                torch.randint(0, 40, (6,), generator=torch.Generator().manual_seed(10 * comm.rank + step))
            ).backward()
        run.optimizer.step()
        ledger.settle()
    run.close()
    assert alike(comm, run.values())


def test_low_rank_factors_agree_after_layers_in_turn(comm):
    """Factors are the same on all ranks whoever has used a layer."""
    run = Run(OVERLAP, comm, two_heads, plain_sgd, PowerSGD(2))
    for step in range(6):
        run.optimizer.zero_grad()
        run.loss(
            step, forward=lambda x, rank, s=step: run.module["out"](run.module[head(s, rank, run.last)](x))
        ).backward()
        run.optimizer.step()
    tensors = run.optimizer.state_dict()["sparsecoll"]["tensors"]
    run.close()
    assert alike(comm, tensors["p"]) and alike(comm, tensors["q"])


@pytest.mark.parametrize("overlap", [True, False])
def test_two_optimizers_on_one_communicator(comm, overlap):
    """One back-propagation for both; without overlap a rank may leave a model out."""
    torch.manual_seed(comm.rank)
    a, b = torch.nn.Linear(6, 40).double(), torch.nn.Linear(6, 40).double()
    inner = [plain_sgd(a.parameters()), torch.optim.AdamW(b.parameters(), 0.01)]
    options = {"dense_below": 10, "timeout": TIMEOUT, "overlap": overlap}
    optimizers = [DistributedOptimizer(o, m, comm, **options) for o, m in zip(inner, (a, b), strict=True)]
    for step in range(6):
        x = torch.randn(4, 6, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        parts = [m(x).square().mean() for m in ((a, b) if (comm.rank + step) % 2 else (b, a))]
        if step == 3 and comm.rank == 0 and not overlap:
            parts[0].backward()
        else:
            sum(parts).backward()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.close()
    assert alike(comm, dict(a.named_parameters())) and alike(comm, dict(b.named_parameters()))


def test_the_hook_takes_an_algorithm_and_verifies(comm):
    """Top k over any algorithm; replicas that differ are found in the next back-propagation, by name."""
    run = train(Run(HOOK, comm, net, plain_sgd, sparsecoll.SparDL(), verify=2), range(4))
    if comm.size > 1:
        with torch.no_grad():
            run.module[2].bias.add_(comm.rank == run.last)
        for _ in range(2):  # until they are the same again
            with pytest.raises(sparsecoll.CommunicationError, match=r"after step 4, got others .*2\.bias' on rank"):
                run.loss(4).backward()
        sparsecoll.torch.broadcast(run.module, comm)
    train(run, [5])
