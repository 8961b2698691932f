"""Steps that fail: on all ranks, with state from which training goes on."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from failing import fail_at, unpatch
from nets import batch, bits, loss_of, net, train

import sparsecoll.torch
from sparsecoll import simulate
from sparsecoll.torch import COMPRESSORS, DistributedOptimizer, SparseSGD, WarmUp
from sparsecoll.torch.compressors import ACPSGD, COVAP, DRAGONN, TopKCompressor, dgc, oktopk

P = 3
RAISING = [name for name in COMPRESSORS if name not in ("free", "none", "fp16", "covap")]  # those let NaN through


def step(comm, model, optimizer, number, poison=None):
    optimizer.zero_grad()
    loss_of(model, batch(comm.rank, number)).backward()
    if poison is not None:
        next(iter(model.parameters())).grad[0, 0] = poison
    optimizer.step()


def residuals_are_finite(optimizer):
    own = optimizer.state_dict()
    tensors = own["sparsecoll"].get("tensors", {})
    held = [t for entries in tensors.values() for t in entries.values()]
    held += [s["residual"] for s in own.get("state", {}).values() if "residual" in s]
    return all(bool(torch.isfinite(t).all()) for t in held)


class Uncompressed(DRAGONN):
    """What DRAGONN decides where the network is fast."""

    def _pays(self, *_):
        return False


DENSE = [
    TopKCompressor(algo="dense"),
    TopKCompressor(algo="dense", momentum=0.9),
    Uncompressed(),
    Uncompressed(momentum=0.9),
]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [*RAISING, *DENSE, "SparseSGD"], ids=str)
def test_training_goes_on_after_a_bad_gradient(name, value):
    """One rank has a NaN in step 2: all raise, the step is not taken, residuals stay finite, steps 3 to 5 are made."""

    def program(comm):
        model = net()
        if name == "SparseSGD":
            optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, density=0.05)
        else:
            inner = torch.optim.SGD(model.parameters(), 0.1)
            options = {"overlap": False, "dense_below": 0}
            optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, name, **options)
        train(comm, model, optimizer, range(2))
        before = bits(model)
        with pytest.raises(ValueError) as caught:
            step(comm, model, optimizer, 2, value if comm.rank == 1 else None)
        unchanged, finite = bits(model) == before, residuals_are_finite(optimizer)
        train(comm, model, optimizer, range(3, 6))
        finite &= residuals_are_finite(optimizer) and all(bool(p.isfinite().all()) for p in model.parameters())
        return str(caught.value), unchanged, finite, bits(model), bits(model) != before

    results = simulate(P, program).results
    texts, unchanged, finite, after, moved = zip(*results, strict=True)
    assert len(set(texts)) == 1 and texts[0].startswith("rank 1: ")
    assert all(unchanged) and all(finite) and len(set(after)) == 1 and all(moved)


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("compressor", [oktopk(0.1), dgc(0.1), "powersgd", "qsgd", "none"], ids=str)
def test_a_rank_that_fails_between_messages_fails_the_step_on_all(compressor, number):
    """Several buckets are under way; whoever was ahead leaves the step out with the others."""

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(
            inner, model.named_parameters(), comm, compressor, bucket_bytes=4000, dense_below=0
        )
        train(comm, model, optimizer, range(2))
        before = bits(model)
        if comm.rank == 2:
            fail_at(comm.transport, "isend", number)
        with pytest.raises(sparsecoll.CommunicationError) as caught:
            step(comm, model, optimizer, 2)
        unpatch(comm.transport, "isend")
        unchanged = bits(model) == before
        train(comm, model, optimizer, range(3, 6))
        return str(caught.value), unchanged, bits(model)

    results = simulate(P, program).results
    assert {text for text, _, _ in results} == {f"rank 2 failed: Fault: isend {number}"}
    assert all(unchanged for _, unchanged, _ in results) and len({after for _, _, after in results}) == 1


def test_another_communicator_keeps_residuals_and_levels_parameters():
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, oktopk(0.05), dense_below=0)
        train(comm, model, optimizer, range(3))
        before = optimizer.state_dict()["sparsecoll"]["tensors"]["residual"]
        if comm.rank == 1:  # one rank has taken a step that the others have not
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
                    inner.state[p]["momentum_buffer"].add_(1)
        optimizer.move(comm)
        after = optimizer.state_dict()["sparsecoll"]["tensors"]["residual"]
        kept = all(torch.equal(before[name], after[name]) for name in before)
        train(comm, model, optimizer, range(3, 6))
        return kept, bits(model)

    results = simulate(P, program).results
    assert all(kept for kept, _ in results) and len({after for _, after in results}) == 1


def test_lists_in_the_state_of_an_optimizer_are_leveled():
    """Those of LBFGS, of other lengths on another rank, with None and numbers; what cannot be sent stays."""

    def program(comm):
        model = net()
        inner = torch.optim.LBFGS(model.parameters(), 0.3, max_iter=3, history_size=4)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, "none", verify=1)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch(comm.rank, 0))
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        (state,) = inner.state.values()
        if comm.rank == 1:
            state["old_dirs"].pop()
            state["old_stps"][0] = state["old_stps"][0] + 1
            state["extra"] = {"pair": (torch.ones(2), 3)}
        if comm.rank == 0:
            state["root's"] = torch.Size([2])  # neither list nor tuple
        state["own"] = object() if comm.rank else {1: "no text"}
        kept = state["own"]
        optimizer.move(comm)
        (state,) = inner.state.values()
        assert state["own"] is kept and ("root's" in state) == (comm.rank == 0)
        lists = {name: value for name, value in state.items() if name not in ("own", "root's")}
        optimizer.step(closure)
        return repr(lists), bits(model)

    assert len(set(simulate(P, program).results)) == 1


def test_state_of_a_step_that_rank_0_has_not_taken_is_removed():
    """The first step fails on rank 0 alone; another rank's momentum has another dtype."""

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, "none")
        failing = inner.register_step_pre_hook(lambda *_: {}["memory"]) if comm.rank == 0 else None
        with pytest.raises(KeyError) if failing else contextlib.nullcontext():
            step(comm, model, optimizer, 0)
        if failing:
            failing.remove()
        optimizer.move(comm)
        empty = not any(state.get("momentum_buffer") is not None for state in inner.state.values())
        train(comm, model, optimizer, range(2))
        if comm.rank == 1:
            for state in inner.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].float()
        optimizer.move(comm)
        train(comm, model, optimizer, range(2))
        return empty, bits(model), [state["momentum_buffer"].tolist() for state in inner.state.values()]

    first, *others = simulate(P, program).results
    assert first[0] and all(other == first for other in others)


@pytest.mark.parametrize(
    "compressor", [TopKCompressor(WarmUp(0.01, steps=8)), ACPSGD(rank=2), COVAP(interval=3, start=1.0)], ids=str
)
def test_a_rank_without_data_counts_the_steps_of_the_others(compressor):
    """Compressors that do something else in other steps do the same on all ranks, and nothing is lost."""

    def program(comm):
        p = torch.nn.Parameter(torch.zeros(128, 32))
        generator, given = torch.Generator().manual_seed(comm.rank), torch.zeros(128, 32)
        optimizer = DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], comm, compressor)
        with optimizer.join():
            for _ in range((2, 6, 4)[comm.rank]):
                optimizer.zero_grad()
                g = torch.randn(128, 32, generator=generator)
                given += g
                (p * g).sum().backward()
                optimizer.step()
        state = optimizer.state_dict()["sparsecoll"]
        assert state["step"] == 6
        return p.detach().clone(), state["tensors"]["residual"]["p"], given

    moved, residuals, given = zip(*simulate(P, program).results, strict=True)
    assert all(torch.equal(p, moved[0]) for p in moved)
    torch.testing.assert_close(sum(residuals) - P * moved[0], sum(given), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("skip", ["zero_grad", "discard"])
@pytest.mark.parametrize("compressor", [dgc(0.1), "none"], ids=["dgc", "none"])
def test_a_step_is_not_skipped_after_a_rank_has_left(compressor, skip):
    """With residuals: that rank has kept what it contributed. The error is raised on all ranks."""

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model, comm, compressor)
        with optimizer.join():
            train(comm, model, optimizer, range(3 if comm.rank else 2))
            if comm.rank:
                loss_of(model, batch(comm.rank, 3)).backward()
                getattr(optimizer, skip)()
        return bits(model)

    if compressor == "none":
        assert len(set(simulate(P, program).results)) == 1
        return
    with pytest.raises((RuntimeError, sparsecoll.CommunicationError), match="a rank has left join"):
        simulate(P, program)


def test_a_closure_is_refused_after_a_rank_has_left():
    """The ranks that have data are told the cure, with which they go on."""

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, "none", dense_below=10)

        def closure(step):
            optimizer.zero_grad()
            loss = loss_of(model, batch(comm.rank, step))
            loss.backward()
            return loss

        with optimizer.join():
            for step in range(4 if comm.rank else 2):
                if step < 2:
                    optimizer.step(partial(closure, step))
                    continue
                if step == 2:
                    with pytest.raises(RuntimeError, match=r"no closure once a rank has left join"):
                        optimizer.step(partial(closure, step))
                else:
                    closure(step)
                optimizer.step()
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


def test_a_checkpoint_is_the_old_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "rank0.pt"
    sparsecoll.torch.save({"step": 1, "w": torch.ones(3)}, path)

    def half(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        sparsecoll.torch.save({"step": 2}, path)
    assert sparsecoll.torch.load(path)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["rank0.pt"]


@pytest.mark.parametrize(
    ("umask", "before", "after"), [(0o022, None, 0o644), (0o077, None, 0o600), (0o022, 0o664, 0o664)]
)
def test_a_checkpoint_has_the_mode_of_any_file_and_keeps_it(umask, before, after, tmp_path):
    path = tmp_path / "rank0.pt"
    if before is not None:
        path.touch()
        path.chmod(before)
    old = os.umask(umask)
    try:
        sparsecoll.torch.save({"step": 1}, path)
        sparsecoll.torch.save({"step": 2}, path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == after


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("named", ["absolute", "relative", "link"])
def test_a_checkpoint_named_by_a_link_is_written_where_that_points(named, exists, tmp_path, monkeypatch):
    (tmp_path / "step2").mkdir()
    file, link = tmp_path / "step2" / "rank0.pt", tmp_path / "latest.pt"
    (tmp_path / "another.pt").symlink_to("step2/rank0.pt")
    link.symlink_to({"absolute": file, "relative": "step2/rank0.pt", "link": "another.pt"}[named])
    if exists:
        sparsecoll.torch.save({"step": 1}, file)
    monkeypatch.chdir(tmp_path)
    sparsecoll.torch.save({"step": 2}, "latest.pt")
    assert link.is_symlink() and not file.is_symlink() and sparsecoll.torch.load(file) == {"step": 2}
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["another.pt", "latest.pt", "rank0.pt"]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "rank0.pt"
    sparsecoll.torch.save({"step": 1}, path)
    program = (
        "import resource, signal, torch, sparsecoll.torch\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        f"    sparsecoll.torch.save({{'w': torch.ones(100_000)}}, {str(path)!r})\n"
        "except RuntimeError as error:\n"
        "    print(error.__context__)\n"
    )
    assert "File too large" in subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120)
    assert sparsecoll.torch.load(path) == {"step": 1} and list(tmp_path.iterdir()) == [path]


def test_a_kill_while_writing_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "rank0.pt"
    sparsecoll.torch.save({"step": 1}, path)
    program = (
        "import os, signal, torch, sparsecoll.torch\n"
        "def half(state, file):\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "torch.save = half\n"
        f"sparsecoll.torch.save({{'step': 2}}, {str(path)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert sparsecoll.torch.load(path) == {"step": 1}


class LargerThanMean(sparsecoll.select.Selector):
    """Selects nothing where there is a NaN."""

    def select(self, x, k):
        values = x.to_dense()
        return sparsecoll.SparseVector.from_dense(np.where(abs(values) >= abs(values).mean(), values, 0))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "method",
    [
        TopKCompressor(0.01, "allgather", sparsecoll.select.RandomK()),
        TopKCompressor(0.01, "allgather", LargerThanMean()),
        TopKCompressor(0.001, "spardl"),
        "efsignsgd",
        "qsgd",
    ],
    ids=str,
)
def test_no_nan_waits_in_a_residual_because_it_was_not_selected(method, size):
    def program(comm):
        w = torch.nn.Parameter(torch.zeros(2000))
        inner = torch.optim.SGD([w], 0.1)
        optimizer = DistributedOptimizer(inner, [("w", w)], comm, method, overlap=False, dense_below=0)
        w.grad = torch.linspace(1, 2, 2000)
        w.grad[5] = float("nan") if comm.rank == size - 1 else 1
        with pytest.raises(ValueError, match="gradient of 'w': expected finite values"):
            optimizer.step()
        return residuals_are_finite(optimizer) and bool(torch.isfinite(w).all())

    assert all(simulate(size, program).results)
