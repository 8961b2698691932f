"""Mistakes that would go unnoticed: equal samples on all ranks, local clipping, means that DDP overwrites, Adam."""

import logging

import pytest
import torch
from launching import python
from nets import batch, bits, loss_of, net, train
from tables import backward, table
from torch.nn.parallel import DistributedDataParallel

from sparsecoll import CommunicationError, simulate
from sparsecoll.torch import (
    DistributedOptimizer,
    HookState,
    LocalOptimizer,
    SparseSGD,
    WarmUp,
    broadcast,
    comm_hook,
    init_process_group,
)
from sparsecoll.torch.compressors import RandomKCompressor, TopKCompressor, nesterovtopk
from sparsecoll.torch.replica.guards import warn_of_combined
from sparsecoll.transport import default_comm, launcher

P = 3


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("data", "warnings"), [("same", 1), ("one other", 0), ("zero", 0)])
def test_the_same_samples_on_all_ranks_are_told_once(caplog, data, warnings, overlap):
    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model, comm, "none", overlap=overlap, bucket_bytes=4000
        )
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, batch(comm.rank == P - 1 and data == "one other", step))
            (loss * (data != "zero")).backward()
            optimizer.step()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, program)
    assert len([r for r in caplog.records if "the same sums on all 3 ranks" in r.getMessage()]) == warnings


@pytest.mark.parametrize(
    ("overlap", "synchronize", "clips", "warnings"),
    [(False, False, True, 1), (False, True, True, 0), (False, False, False, 0), (True, False, True, 0)],
)
def test_clipping_of_local_gradients_is_told_once(caplog, overlap, synchronize, clips, warnings):
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model, comm, "none", overlap=overlap)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            for part in range(2):
                loss_of(model, batch(comm.rank, 2 * step + part)).backward()
            if synchronize:
                optimizer.synchronize()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, program)
    assert (
        len([r for r in caplog.records if "with overlap=False that acts on each rank's own" in r.message]) == warnings
    )


@pytest.fixture
def group_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # init_process_group sets them; what was there before comes back
    init_process_group()
    yield
    torch.distributed.destroy_process_group()


def test_a_model_that_ddp_wraps_is_refused(group_of_one):
    model = net()
    wrapped = DistributedDataParallel(model)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match=r"got a DistributedDataParallel.*comm_hook"):
        DistributedOptimizer(inner, wrapped.named_parameters())
    for outer in (torch.nn.Sequential(wrapped), torch.compile(wrapped, backend="eager")):
        with pytest.raises(TypeError, match=r"got a DistributedDataParallel.*comm_hook"):
            DistributedOptimizer(inner, outer)
    optimizer = DistributedOptimizer(inner, model.named_parameters())
    with pytest.raises(RuntimeError, match=r"inside of a DistributedDataParallel.*comm_hook"):
        wrapped(batch(0, 0)[0])
    loss_of(model, batch(0, 0)).backward()
    optimizer.step()
    assert not model._forward_pre_hooks  # costs nothing from now on
    optimizer = DistributedOptimizer(inner, model.named_parameters())
    optimizer.close()
    loss_of(wrapped, batch(0, 0)).backward()


def test_hooks_of_the_state_let_all_ranks_load_rank_0s(tmp_path):
    """What a framework does that knows nothing of residuals: rank 0 saves, all load it."""
    files = [tmp_path / f"{name}.pt" for name in ("all", *range(P))]

    def program(comm):
        def made():
            model = net()
            inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
            return model, DistributedOptimizer(
                inner, model, comm, TopKCompressor(0.05, algo="allgather"), dense_below=0
            )

        model, optimizer = made()
        seen = []
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": "after"})
        train(comm, model, optimizer, range(3))
        state = optimizer.state_dict()
        assert seen == ["before"] and state.pop("note") == "after"
        torch.save(state["sparsecoll"], files[1 + comm.rank])
        if comm.rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": state}, files[0])
        train(comm, model, optimizer, range(3, 6))

        again, other = made()
        saved = torch.load(files[0])
        again.load_state_dict(saved["model"])
        with pytest.raises(CommunicationError, match="load the file that this rank saved"):
            other.load_state_dict(saved["optimizer"])
        own = torch.load(files[1 + comm.rank])
        other.register_load_state_dict_pre_hook(lambda _, state: {**state, "sparsecoll": own})
        other.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        other.load_state_dict(saved["optimizer"])
        assert seen == ["before", "loaded"] and saved["optimizer"]["sparsecoll"]["rank"] == 0
        train(comm, again, other, range(3, 6))
        return bits(model), bits(again)

    for uninterrupted, resumed in simulate(P, program).results:
        assert uninterrupted == resumed


def test_a_hook_that_fails_on_one_rank_fails_on_all():
    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm)
        if comm.rank == 1:
            optimizer.register_load_state_dict_pre_hook(lambda *_: {}["residuals"])
        with pytest.raises(CommunicationError, match="rank 1 failed: KeyError: 'residuals'"):
            optimizer.load_state_dict(optimizer.state_dict())

    simulate(P, program)


def mpi():
    """mpi4py.MPI; None if there is no MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI


@pytest.mark.parametrize("given", ["None", "default_comm()", "MPI.COMM_WORLD"])
def test_a_launcher_that_mpi_does_not_know_is_refused(monkeypatch, given):
    """As under torchrun: two processes, each with a world of one rank."""
    MPI = mpi()
    if MPI is None and given == "MPI.COMM_WORLD":
        pytest.skip("no MPI library")
    for size, rank in launcher.VARIABLES:
        monkeypatch.delenv(size, raising=False)
        monkeypatch.delenv(rank, raising=False)
    comm = eval(given, {"MPI": MPI, "default_comm": default_comm})
    inner = torch.optim.SGD(net().parameters(), 0.1)
    DistributedOptimizer(inner, [(f"p{i}", p) for i, p in enumerate(inner.param_groups[0]["params"])], comm).close()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for make in (
        lambda: DistributedOptimizer(inner, [], comm),
        lambda: HookState(comm),
        lambda: broadcast(net(), comm),
        lambda: init_process_group(comm),
    ):
        with pytest.raises(RuntimeError, match="expected 2 ranks, as WORLD_SIZE says, got one"):
            make()
    if MPI is not None:
        model = net()
        DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, MPI.COMM_SELF).close()


@pytest.mark.parametrize("state", [None, "qsgd", HookState])
def test_the_ddp_hook_says_which_state_it_needs(state):
    with pytest.raises(TypeError, match=r"state: expected a HookState, got .*register_comm_hook\(HookState\("):
        comm_hook(state, None)


MIXED = """
import sys, torch
import torch.distributed as dist
from mpi4py import MPI
import sparsecoll, sparsecoll.torch
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
for comm in (MPI.COMM_WORLD, MPI.COMM_WORLD.Split(0)):
    try:
        sparsecoll.torch.broadcast(torch.nn.Linear(2, 2), comm)
    except RuntimeError as error:
        print("refused:", error)
sparsecoll.torch.broadcast(torch.nn.Linear(2, 2), MPI.COMM_SELF)
"""


def test_mpis_world_of_one_rank_is_refused_beside_a_process_group():
    """torchrun starts no MPI: every process would train on its own."""
    if mpi() is None:
        pytest.skip("no MPI library")
    done = python("-c", MIXED, check=True)
    refused = "refused: comm: expected the 3 ranks of torch.distributed, got one rank of an MPI"
    assert done.stdout.count(refused) == 2


def test_torch_without_distributed_is_refused(monkeypatch):
    import importlib

    import sparsecoll.torch

    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    with pytest.raises(ImportError, match=r"sparsecoll.torch: expected PyTorch with torch.distributed, got one that"):
        importlib.reload(sparsecoll.torch)


@pytest.mark.parametrize(
    ("optimizer", "compressor", "warnings"),
    [
        (torch.optim.AdamW, "topk", 1),
        (torch.optim.AdamW, WarmUp(0.01, 5), 1),
        (torch.optim.AdamW, 0.2, 0),
        (torch.optim.AdamW, "qsgd", 0),
        (torch.optim.SGD, "topk", 0),
    ],
)
def test_adam_behind_a_top_k_is_told_once(caplog, optimizer, compressor, warnings):
    own = compressor if isinstance(compressor, str) else TopKCompressor(compressor)

    def program(comm):
        model = net()
        DistributedOptimizer(optimizer(model.parameters(), 0.1), model, comm, own).close()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, program)
    assert caplog.text.count("AdamW divides by its own size") == warnings


@pytest.mark.parametrize(("momentum", "compressor", "warnings"), [(0.9, "dgc", 1), (0.9, "topk", 0), (0.0, "dgc", 0)])
def test_momentum_in_the_compressor_and_in_the_optimizer_is_told_once(caplog, momentum, compressor, warnings):
    def program(comm):
        model = net()
        DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum), model, comm, compressor).close()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, program)
    assert caplog.text.count("gradients get both, as if the learning rate were 10 times as large") == warnings
    assert caplog.text.count(f"{compressor} has a momentum of 0.9, and SGD one of 0.9") == warnings


@pytest.mark.parametrize(
    ("algo", "density", "warned"), [("oktopk", 0.01, 1), ("allgather", 0.3, 0), ("dense", None, 0), (None, None, 0)]
)
@pytest.mark.parametrize("adapter", ["SparseSGD", "DistributedOptimizer", "randomk"])
def test_momentum_behind_a_residual_is_told_once_with_the_cure(caplog, adapter, algo, density, warned):
    def program(comm):
        model = net()
        if adapter == "SparseSGD":
            SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, algo=algo, density=density)
            return
        compressor = None if algo is None else TopKCompressor(density or 1, algo=algo)
        if adapter == "randomk":
            compressor = RandomKCompressor(density or 1)
        DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9), model, comm, compressor).close()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, program)
    assert caplog.text.count("with momentum=0.9 in S") == warned == caplog.text.count("Pass no compressor or algo")


def test_a_momentum_that_local_optimizer_has_too_is_told_by_its_name(caplog):
    def program(comm):
        model, compressor = net(), nesterovtopk(0.05)
        LocalOptimizer(torch.optim.AdamW(model.parameters()), model, comm, compressor, outer_momentum=0.9).close()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, program)
    (record,) = caplog.records
    assert record.message.startswith("nesterovtopk has a momentum of 0.7, and LocalOptimizer one of 0.9")
    assert "Use outer_momentum=0 in LocalOptimizer" in record.message


@pytest.mark.parametrize(
    ("optimizer", "compressor", "warnings"),
    [
        (lambda params: torch.optim.SGD(params, 0.1), "nesterovtopk", 1),
        (lambda params: torch.optim.SGD(params, 0.1), "topk", 0),
        (lambda params: torch.optim.SGD([{"params": params, "momentum": 0.7}], 0.1), "dgc", 0),
        (torch.optim.SparseAdam, "dgc", 0),
    ],
)
def test_momentum_that_rows_do_not_get_is_told_once(caplog, optimizer, compressor, warnings):
    def program(comm):
        embedding, other = table(), table()
        model = torch.nn.ModuleList([embedding, other])
        wrapped = DistributedOptimizer(optimizer(model.parameters()), model, comm, compressor)
        for step in range(4):
            wrapped.zero_grad()
            backward(embedding, comm.rank, step)
            if step in (1, 3):
                backward(other, comm.rank, step)
            other.requires_grad_(step != 1)  # buckets are made again
            wrapped.step()
        wrapped.close()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, program)
    assert "gradients get both" not in caplog.text
    assert len([r for r in caplog.records if "is not applied to the sparse gradient of" in r.message]) == warnings
    assert ("of '0.weight': give this table" in caplog.text or "of '1.weight': give" in caplog.text) == bool(warnings)


def test_hooks_that_are_gone_leave_nothing_behind():
    """A pair of hooks in the steps of all optimizers, however many loops there have been."""
    from torch.optim import optimizer as torchs

    def hooks():
        return len(torchs._global_optimizer_pre_hooks), len(torchs._global_optimizer_post_hooks)

    def program(comm):
        HookState(comm, "topk", net())

    simulate(2, program)
    before = hooks()
    for _ in range(3):
        simulate(2, program)
    assert hooks() == before


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_several_back_propagations_that_are_combined_are_told(overlap, caplog):
    """As PCGrad does; with overlap=False they are reduced after that."""
    warn_of_combined.cache_clear()

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model, comm, TopKCompressor(0.1), overlap=overlap)
        found = []
        for part in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, part)).backward()
            found.append([p.grad.clone() for p in model.parameters()])
        for p, one, other in zip(model.parameters(), *found, strict=True):
            p.grad = one + other
        optimizer.step()

    simulate(2, program)
    assert ("pass overlap=False" in caplog.text) == overlap
