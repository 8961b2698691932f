"""Layers that are frozen in turn: buckets that are made again go on with the turns that they had taken."""

import pytest
import torch

from sparsecoll import NonFiniteError, simulate
from sparsecoll.torch import DistributedOptimizer, SparseSGD
from sparsecoll.torch.compressors import ACPSGD, COVAP, RandomKCompressor, TopKCompressor

EVERY = [
    COVAP(2),
    COVAP(4),
    RandomKCompressor(0.1),
    TopKCompressor(
        0.1,
        "cltk",
    ),
    "SparseSGD",
]


def train(comm, how, steps, draw=torch.ones, shape=(64,)):
    """Yield the optimizer and two layers after each step, in which the last rank has a gradient of one of them."""
    layers = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    if how == "SparseSGD":
        optimizer = SparseSGD(layers, 0.1, comm=comm, algo="cltk", density=0.1)
    else:
        named = zip("ab", layers, strict=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(layers, 0.1), named, comm, how, dense_below=0)
    for step in range(steps):
        for i, layer in enumerate(layers):
            layer.requires_grad_(i == step % 2)
        optimizer.zero_grad()
        (layers[step % 2].mul(draw(shape)).sum() * (comm.rank == comm.size - 1)).backward()
        optimizer.step()
        yield optimizer, layers


@pytest.mark.parametrize("how", EVERY, ids=str)
@pytest.mark.parametrize("P", [1, 3])
def test_every_value_is_trained(how, P):
    def program(comm):
        *_, (_, layers) = train(comm, how, 240)
        return [int(layer.count_nonzero()) for layer in layers]

    assert simulate(P, program).results == [[64, 64]] * P


def test_both_factors_of_acpsgd_are_formed():
    def program(comm):
        seen = [
            optimizer.state_dict()["sparsecoll"]["tensors"]
            for optimizer, _ in train(comm, ACPSGD(1), 8, torch.rand, (8, 8))
        ]
        return [bool((seen[3][kind][name] == t).all()) for kind in "pq" for name, t in seen[7][kind].items()]

    assert simulate(2, program).results == [[False] * 4] * 2


def test_random_coordinates_go_on_after_steps_that_are_refused():
    """As those of a GradScaler with overflows: the same ones would be sent after each of them."""

    def program(comm):
        p = torch.nn.Parameter(torch.zeros(400))
        inner = torch.optim.SGD([p], 0.1)
        optimizer = DistributedOptimizer(inner, [("p", p)], comm, RandomKCompressor(0.01), dense_below=0)
        for step in range(200):
            optimizer.zero_grad()
            (p.sum() * (float("nan") if step % 5 == 4 and comm.rank == 0 else 1.0)).backward()
            if step % 5 == 4:
                with pytest.raises(NonFiniteError):
                    optimizer.step()
            else:
                optimizer.step()
        return int(p.count_nonzero())

    counts = simulate(2, program).results
    assert counts[0] == counts[1] > 250  # of 640 draws
