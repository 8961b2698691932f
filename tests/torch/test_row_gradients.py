"""Gradients of embeddings: the same bits as one process, rows from end to end, and nothing of the table's size."""

import logging
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import bits, close  # noqa: E402
from tables import D, N, P, backward, loss_of, rows_of, table, train  # noqa: E402

import sparsecoll.torch  # noqa: E402
from sparsecoll import RowSparse, simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, SparseSGD, redistribute  # noqa: E402

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "SparseAdam": lambda params: torch.optim.SparseAdam(list(params), 0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in OPTIMIZERS), ("SGD", torch.bfloat16), ("SGD", torch.float64)],
)
def test_an_optimizer_steps_as_one_process_with_the_mean(name, dtype):
    alone = table(dtype)
    optimizer = OPTIMIZERS[name](alone.parameters())
    for step in range(3):
        parts = []
        for rank in range(P):
            alone.zero_grad()
            backward(alone, rank, step)
            parts.append(rows_of(alone.weight.grad))
        mean = RowSparse.merge(parts, parts[0].dtype) / parts[0].dtype.type(P)
        indices, values = torch.from_numpy(mean.rows)[None], torch.from_numpy(mean.values).to(dtype)
        alone.weight.grad = torch.sparse_coo_tensor(indices, values, (N, D), is_coalesced=True, check_invariants=False)
        optimizer.step()

    def program(comm):
        embedding = table(dtype)
        optimizer = DistributedOptimizer(OPTIMIZERS[name](embedding.parameters()), embedding, comm)
        for step in range(3):
            optimizer.zero_grad()
            backward(embedding, comm.rank, step)
            assert embedding.weight.grad.is_sparse and embedding.weight.grad.is_coalesced()
            optimizer.step()
        return bits(embedding)

    assert set(simulate(P, program).results) == {bits(alone)}


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}]
)
def test_sparse_sgd_keeps_rows(settings):
    def run(make, ranks):
        embedding = table(torch.float64)
        optimizer = make(embedding.parameters(), 0.1, **settings)
        for step in range(4):
            optimizer.zero_grad()
            for rank in ranks:
                backward(embedding, rank, step, 1 / len(ranks))
            if len(ranks) > 1:
                embedding.weight.grad = embedding.weight.grad.to_dense()  # torch takes no weight decay of sparse ones
            optimizer.step()
        return [embedding.weight.detach().clone()], optimizer

    expected, _ = run(torch.optim.SGD, range(P))

    def program(comm):
        result, optimizer = run(lambda *a, **s: SparseSGD(*a, comm=comm, density=0.01, **s), [comm.rank])
        state = optimizer.state_dict()
        assert state["sparsecoll"]["rows"] and not state["sparsecoll"]["tensors"]
        if settings.get("momentum"):
            assert state["state"][0]["momentum_buffer"].is_sparse
        return result

    for result in simulate(P, program).results:
        close(result, expected)


def test_a_parameter_without_a_module_that_says_so():
    def program(comm):
        weight, never = torch.nn.Parameter(torch.ones(N, D)), torch.nn.Parameter(torch.ones(N, D))
        named = {"weight": weight, "never": never}
        inner = torch.optim.SGD(named.values(), 1.0)
        optimizer = DistributedOptimizer(inner, named.items(), comm, "topk", dense_below=0)
        kinds = []
        for step in range(4):
            optimizer.zero_grad()
            if step == 2 or (step == 1 and comm.rank == 1):
                torch.nn.functional.embedding(torch.tensor([step, step]), weight, sparse=True).sum().backward()
            optimizer.step()
            kinds.append(None if weight.grad is None else weight.grad.is_sparse)
        assert never.grad is None
        return kinds, weight[:, 0].tolist()[:4], optimizer.state_dict()["sparsecoll"]["rows"]

    for kinds, weight, rows in simulate(2, program).results:
        assert kinds == [None, True, True, None] and weight == [1, 0, -1, 1] and rows == ["weight"]


def test_rows_are_added_to_a_mean_without_rows():
    """As after zero_grad(set_to_none=False), and a back-propagation that looks nothing up."""

    def program(comm):
        embedding, other = table(), torch.nn.Parameter(torch.zeros(1))
        named = [("weight", embedding.weight), ("other", other)]
        optimizer = DistributedOptimizer(torch.optim.SGD([p for _, p in named], 1.0), named, comm, "none")
        backward(embedding, comm.rank, 0)
        optimizer.zero_grad(set_to_none=False)
        other.sum().backward()
        assert embedding.weight.grad._nnz() == 0
        backward(embedding, comm.rank, 1)
        return rows_of(embedding.weight.grad).nnz

    assert min(simulate(2, program).results) > 0


@pytest.mark.parametrize("way", ["DistributedOptimizer", "SparseSGD"])
def test_a_dense_gradient_on_one_rank_makes_it_dense_on_all(way, caplog):
    def run(make, ranks):
        embedding = table(torch.float64)
        optimizer = make(embedding)
        for step in range(4):
            optimizer.zero_grad()
            losses = [loss_of(embedding, rank, step) for rank in ranks]
            if step == 2 and 1 in ranks:
                losses.append(embedding.weight.square().sum())
            (sum(losses) / len(ranks)).backward()
            optimizer.step()
        return [embedding.weight.detach().clone()]

    expected = run(lambda embedding: torch.optim.SGD(embedding.parameters(), 0.1), range(P))

    def program(comm):
        if way == "SparseSGD":
            return run(lambda e: SparseSGD(e.parameters(), 0.1, comm=comm, algo="dense"), [comm.rank])
        inner = OPTIMIZERS["SGD"]
        return run(lambda e: DistributedOptimizer(inner(e.parameters()), e, comm, "none"), [comm.rank])

    with caplog.at_level(logging.WARNING):
        for result in simulate(P, program).results:
            close(result, expected)
    assert sum("weight': expected a sparse one on all ranks" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("compressor", ["topk", "none", "free"])
def test_nan_in_a_row_of_one_rank_raises_on_all(compressor):
    def program(comm):
        embedding = table()
        optimizer = DistributedOptimizer(OPTIMIZERS["SGD"](embedding.parameters()), embedding, comm, compressor)
        backward(embedding, comm.rank, 0, np.nan if comm.rank == 1 else 1.0)
        gradient = embedding.weight.grad
        try:
            optimizer.step()
        except sparsecoll.NonFiniteError as error:
            return str(error), gradient.is_sparse and bool(gradient._values().isnan().any()), bits(embedding)
        return "", bool(gradient._values().isnan().any()), None

    results = simulate(P, program).results
    if compressor == "topk":
        assert len(set(results)) == 1
        assert results[0][:2] == ("rank 1: gradient of 'weight': expected finite values, got NaN or infinity", True)
    else:
        assert [result[:2] for result in results] == [("", compressor == "none" or rank == 1) for rank in range(P)]


@pytest.mark.parametrize("way", ["unscale", "step", "SparseSGD"])
def test_a_scaler_skips_steps_of_rows_on_all_ranks(way):
    def program(comm):
        embedding = table()
        params, scaler = embedding.parameters(), torch.amp.GradScaler("cpu", init_scale=4.0)
        if way == "SparseSGD":
            optimizer = SparseSGD(params, 0.1, comm=comm, grad_scaler=scaler)
        else:
            optimizer = DistributedOptimizer(OPTIMIZERS["SGD"](params), embedding, comm, grad_scaler=scaler)
        values = [embedding.weight.detach().clone()]
        for step in range(2):
            optimizer.zero_grad()
            backward(embedding, comm.rank, step, scaler.get_scale() * (np.inf if (step, comm.rank) == (0, 1) else 1.0))
            scaler.scale(torch.zeros(()))  # as a loss that is scaled
            if way == "unscale":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            values.append(embedding.weight.detach().clone())
        return scaler.get_scale(), *values

    def plain(_):
        embedding = table()
        optimizer = OPTIMIZERS["SGD"](embedding.parameters())
        for rank in range(P):
            backward(embedding, rank, 1, 1 / P)
        optimizer.step()
        return embedding.weight.detach()

    for scale, start, skipped, stepped in simulate(P, program).results:
        assert scale == 2.0 and torch.equal(start, skipped)
        torch.testing.assert_close(stepped, plain(None))


@pytest.mark.parametrize("way", ["DistributedOptimizer", "SparseSGD"])
def test_saved_state_goes_on_with_the_same_bits(way, tmp_path):
    def made(comm):
        embedding = table()
        if way == "SparseSGD":
            return embedding, SparseSGD(embedding.parameters(), 0.1, 0.9, comm=comm)
        inner = OPTIMIZERS["SGD with momentum"](embedding.parameters())
        return embedding, DistributedOptimizer(inner, embedding, comm)

    def program(comm):
        embedding, optimizer = made(comm)
        train(comm, embedding, optimizer, range(2))
        sparsecoll.torch.save((optimizer.state_dict(), embedding.state_dict()), tmp_path / f"{comm.rank}.pt")
        state, weights = sparsecoll.torch.load(tmp_path / f"{comm.rank}.pt")
        train(comm, embedding, optimizer, range(2, 4))
        other, resumed = made(comm)
        other.load_state_dict(weights)
        resumed.load_state_dict(state)
        train(comm, other, resumed, range(2, 4))
        return bits(embedding) == bits(other), state

    results = simulate(P, program).results
    assert all(same for same, _ in results)
    assert redistribute([state for _, state in results], 0, 1)["sparsecoll"]["rows"]


@pytest.mark.parametrize("way", ["DistributedOptimizer", "SparseSGD"])
def test_ranks_with_fewer_batches_get_the_rows_of_the_others(way):
    def program(comm):
        embedding = table()
        if way == "SparseSGD":
            optimizer = SparseSGD(embedding.parameters(), 0.1, 0.9, comm=comm)
        else:
            inner = OPTIMIZERS["SGD with momentum"](embedding.parameters())
            optimizer = DistributedOptimizer(inner, embedding, comm)
        with optimizer.join():
            for step in range(1 + comm.rank):
                optimizer.zero_grad()
                backward(embedding, comm.rank, step)
                optimizer.step()
        buffer = optimizer.state[embedding.weight]["momentum_buffer"].coalesce()
        return bits(embedding), buffer.indices().tolist(), buffer.values().tolist()

    results = simulate(P, program).results
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("way", ["DistributedOptimizer", "SparseSGD"])
def test_no_memory_of_the_tables_size(way):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux")
    n = 1_000_000

    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

    def program(comm):
        weight = torch.nn.Parameter(torch.zeros(n, D * 4))
        named = [("weight", weight)]
        if way == "SparseSGD":
            optimizer = SparseSGD([weight], 0.1, 0.9, comm=comm, density=0.5)
        else:
            optimizer = DistributedOptimizer(torch.optim.SGD([weight], 0.1, 0.9), named, comm, "topk")
        before = 0
        for step in range(4):
            if step == 2 and comm.rank == 0:
                before = status("VmRSS")
                Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
            optimizer.zero_grad()
            ids = torch.randint(0, n, (100,), generator=torch.Generator().manual_seed(step))
            torch.nn.functional.embedding(ids, weight, sparse=True).sum().backward()
            optimizer.step()
        return status("VmHWM") - before if comm.rank == 0 else 0, weight.nbytes, optimizer.traffic.total.bytes_received

    more, size, received = simulate(2, program).results[0]
    assert more < size / 4 and received < size * 1.5  # the table, at the start, and some rows


def test_fp16_tells_a_scaler_of_rows_beyond_its_range():
    def program(comm):
        table = torch.nn.Embedding(6, 2, sparse=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.0), table, comm, "fp16")
        scales = torch.tensor([1.0, 6e4, 1e6 if comm.rank == 0 else -9e5])
        (table(torch.tensor([0, 2, 3])) * scales[:, None]).sum().backward()
        optimizer.step()
        return table.weight.grad.to_dense()[[0, 2, 3], 0].tolist()

    for small, near, beyond in simulate(2, program).results:
        assert small == 1.0 and near == np.float16(6e4) and not np.isfinite(beyond)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_table_whose_gradient_becomes_dense_keeps_its_momentum(nesterov):
    def program(comm, make):
        torch.manual_seed(0)
        table = torch.nn.Embedding(50, 4, sparse=comm is not None)
        optimizer = make(table, comm)
        for step in range(4):
            optimizer.zero_grad()
            loss = table(torch.tensor([1, 2])).sum() if step < 2 else table.weight.square().sum()
            loss.backward()
            optimizer.step()
        return table.weight.detach()

    def sparse(table, comm):
        return SparseSGD(table.parameters(), 0.1, 0.9, nesterov=nesterov, algo="allgather", density=1.0, comm=comm)

    expected = program(None, lambda table, comm: torch.optim.SGD(table.parameters(), 0.1, 0.9, nesterov=nesterov))
    for y in simulate(2, lambda comm: program(comm, sparse)).results:
        torch.testing.assert_close(y, expected)
