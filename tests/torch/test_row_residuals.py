"""The rows of largest norm are sent, and the others wait in a residual of rows; values of rows in 16 bits."""

import pytest
import torch
from nets import bits, close
from tables import D, N, P, backward, loss_of, table, train

import sparsecoll.torch
from sparsecoll import simulate
from sparsecoll.torch import DistributedOptimizer, SparseSGD, redistribute
from sparsecoll.torch.compressors import TopKCompressor

WAYS = ["DistributedOptimizer", "SparseSGD"]


def with_feedback(way, embedding, comm, value_dtype=None, row_density=0.1, momentum=0.0, **options):
    options |= {"value_dtype": value_dtype, "row_density": row_density}
    if way == "SparseSGD":
        return SparseSGD(embedding.parameters(), 1.0, momentum, comm=comm, **options)
    inner = torch.optim.SGD(embedding.parameters(), 1.0, momentum)
    return DistributedOptimizer(inner, embedding, comm, TopKCompressor(**options), dense_below=0)


def residual_of(optimizer):
    return optimizer.state_dict()["sparsecoll"]["tensors"]["residual"]["weight"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value_dtype", [None, "bfloat16", "float16"])
def test_the_largest_rows_are_sent_and_the_others_wait(way, value_dtype):
    """All gradients = P * what has moved the table + all residuals, of which a rank holds rows only."""

    def program(comm):
        embedding = table()
        start, given = embedding.weight.detach().clone(), torch.zeros(N, D)
        optimizer = with_feedback(way, embedding, comm, value_dtype)
        for step in range(4):
            optimizer.zero_grad()
            if (comm.rank, step) != (1, 2):  # a rank that looks nothing up sends what waits
                backward(embedding, comm.rank, step)
            if step == 1 and way != "SparseSGD":
                kept = residual_of(optimizer)
                optimizer.zero_grad()  # skips the step
                assert torch.equal(residual_of(optimizer).to_dense(), kept.to_dense())
                backward(embedding, comm.rank, step)
            if embedding.weight.grad is not None and (way == "SparseSGD" or comm.size == 1):
                assert embedding.weight.grad.is_sparse
            optimizer.step()
            local = torch.nn.Embedding(N, D, sparse=True)
            if (comm.rank, step) != (1, 2):
                backward(local, comm.rank, step)
                given += local.weight.grad.to_dense()
        left = residual_of(optimizer)
        assert left.is_sparse and 0 < left.coalesce().indices().shape[1] < N
        return start - embedding.weight.detach(), left.to_dense(), given

    results = simulate(P, program).results
    assert all(torch.equal(moved, results[0][0]) for moved, _, _ in results)
    total, left = sum(given for *_, given in results), sum(left for _, left, _ in results)
    torch.testing.assert_close(P * results[0][0] + left, total, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(P * results[0][0], total, atol=0.1)


@pytest.mark.parametrize(
    ("compressor", "rounds"), [("fp16", "float16"), (TopKCompressor(value_dtype="bfloat16"), "bfloat16")]
)
def test_rows_in_half_precision(compressor, rounds):
    def program(comm):
        embedding = table()
        optimizer = DistributedOptimizer(torch.optim.SGD(embedding.parameters(), 0.1), embedding, comm, compressor)
        before = optimizer.traffic.copy()
        backward(embedding, comm.rank, 0, 3e4 if rounds == "float16" else 1.0)  # whose sum is beyond half precision
        gradient = embedding.weight.grad
        return gradient.to_dense(), optimizer.traffic.since(before).total.bytes_received, optimizer.state_dict()

    alone = table()
    for rank in range(P):
        backward(alone, rank, 0, 3e4 / P if rounds == "float16" else 1 / P)
    results = simulate(P, program).results
    for mean, _, state in results:
        close([mean], [alone.weight.grad.to_dense()], rtol=2**-7, atol=2**-5)
        assert torch.equal(mean, results[0][0]) and not state["sparsecoll"]["tensors"]


@pytest.mark.parametrize("way", WAYS)
def test_residuals_of_rows_are_saved_and_moved(way, tmp_path):
    def program(comm):
        embedding = table()
        optimizer = with_feedback(way, embedding, comm, "bfloat16", momentum=0.5)
        train(comm, embedding, optimizer, range(2))
        sparsecoll.torch.save((optimizer.state_dict(), embedding.state_dict()), tmp_path / f"{comm.rank}.pt")
        state, weights = sparsecoll.torch.load(tmp_path / f"{comm.rank}.pt")
        train(comm, embedding, optimizer, range(2, 4))
        other = table()
        other.load_state_dict(weights)
        resumed = with_feedback(way, other, comm, "bfloat16", momentum=0.5)
        resumed.load_state_dict(state)
        train(comm, other, resumed, range(2, 4))
        return bits(embedding) == bits(other), state

    results = simulate(P, program).results
    assert all(same for same, _ in results)
    states = [state for _, state in results]
    kept = [state["sparsecoll"]["tensors"]["residual"]["weight"].to_dense() for state in states]
    for size in (1, P + 1):
        new = [redistribute(states, rank, size)["sparsecoll"]["tensors"]["residual"]["weight"] for rank in range(size)]
        assert all(t.is_sparse for t in new)
        torch.testing.assert_close(sum(t.to_dense() for t in new), sum(kept) * (size / P))


def test_a_table_that_becomes_dense_keeps_its_residual():
    def program(comm):
        embedding = table()
        optimizer = with_feedback("DistributedOptimizer", embedding, comm)
        backward(embedding, comm.rank, 0)
        optimizer.step()
        kept = residual_of(optimizer).to_dense()
        optimizer.zero_grad()
        embedding.weight.square().sum().backward()  # dense
        return kept, residual_of(optimizer)

    for kept, residual in simulate(P, program).results:
        assert kept.any() and not residual.is_sparse and torch.equal(residual, kept)


@pytest.mark.parametrize("dense_below", [0, 1024])
@pytest.mark.parametrize("resumed", [False, True])
def test_what_waits_for_a_table_is_sent_with_its_dense_gradients(dense_below, resumed):
    """All gradients = P * what has moved the table, also if it is so small that its dense gradients are exact."""

    def program(comm):
        embedding = table()
        start, given = embedding.weight.detach().clone(), torch.zeros(N, D)

        def wrapped():
            inner = torch.optim.SGD(embedding.parameters(), 1.0)
            return DistributedOptimizer(
                inner, embedding, comm, TopKCompressor(1.0, row_density=0.1), dense_below=dense_below
            )

        optimizer = wrapped()
        for step in range(4):
            optimizer.zero_grad()
            own = table()
            for model in (own, embedding):
                loss = loss_of(model, comm.rank, step)
                if step >= 2 and comm.rank == 1:
                    loss = loss + step * model.weight.sum()  # dense on one rank
                loss.backward()
            gradient = own.weight.grad
            given += gradient.to_dense() if gradient.is_sparse else gradient
            optimizer.step()
            assert residual_of(optimizer).to_dense().any() == (step < 2)
            if resumed:
                state = optimizer.state_dict()
                optimizer.close()
                optimizer = wrapped()
                optimizer.load_state_dict(state)
        return start - embedding.weight.detach(), given

    results = simulate(P, program).results
    assert all(torch.equal(moved, results[0][0]) for moved, _ in results)
    torch.testing.assert_close(P * results[0][0], sum(given for _, given in results), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("clip", [0.5, 1e3])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("row_density", [None, 1.0])
@pytest.mark.parametrize("clip_by", ["parameter", "bucket"])
def test_clipping_is_that_of_dense_gradients(clip, scaled, row_density, clip_by):
    def program(comm):
        models = []
        for sparse in (True, False):
            embedding = table(torch.float64)
            embedding.sparse = sparse
            inner = torch.optim.SGD(embedding.parameters(), 0.1)
            compressor = TopKCompressor(1.0, "dense", clip=clip, clip_by=clip_by, row_density=row_density)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
            optimizer = DistributedOptimizer(inner, embedding, comm, compressor, dense_below=0, grad_scaler=scaler)
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(embedding, comm.rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
            models.append(embedding.weight.detach())
        return models

    for rows, dense in simulate(P, program).results:
        torch.testing.assert_close(rows, dense)
        moved = (dense - table(torch.float64).weight.detach()).norm()
        assert (moved < 3 * 0.1 * 0.5) == (clip == 0.5)


def test_what_row_density_refuses():
    with pytest.raises(ValueError, match=r"row_density: expected in \(0, 1\], got 2"):
        TopKCompressor(row_density=2)
    with pytest.raises(TypeError, match="row_density: expected a number or a Schedule, got the mapping"):
        TopKCompressor(row_density={"weight": 0.1})
