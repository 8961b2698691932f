"""step() within torch.inference_mode(), and gradients that were made there, as plain torch takes them."""

import contextlib

import pytest
import torch
from cases import pairwise
from nets import batch, bits, loss_of, net

from sparsecoll import simulate
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, SparseSGD

INNER = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
}
KINDS = {
    "overlap": lambda comm, model, inner: DistributedOptimizer(inner, model, comm, "topk"),
    "no overlap": lambda comm, model, inner: DistributedOptimizer(inner, model, comm, "topk", overlap=False),
    "views": lambda comm, model, inner: DistributedOptimizer(
        inner, model, comm, overlap=False, gradient_as_bucket_view=True
    ),
    "local": lambda comm, model, inner: LocalOptimizer(inner, model, comm, "topk", every=2),
    "sparse": lambda comm, model, _: SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, density=0.1),
}


CHANGES = [("", True), ("", False), ("in place", True), ("in place", False)]
CHANGES += [("as others", True)]  # torch itself refuses to zero an inference tensor


@pytest.mark.parametrize(("kind", "inner", "changes"), pairwise(KINDS, INNER, CHANGES))
def test_a_step_in_inference_mode_is_the_same_as_outside(kind, inner, changes):
    clips, to_none = changes

    def program(comm, mode):
        model = net()
        optimizer = KINDS[kind](comm, model, INNER[inner](model))
        for step in range(5):
            optimizer.zero_grad(to_none)
            loss_of(model, batch(comm.rank, step)).backward()
            with mode():
                for p in model.parameters():
                    if clips == "as others":
                        p.grad = p.grad * 0.5
                    elif clips:
                        p.grad.mul_(0.5)
                optimizer.step()
        return bits(model)

    inside = simulate(3, lambda comm: program(comm, torch.inference_mode)).results
    outside = simulate(3, lambda comm: program(comm, contextlib.nullcontext)).results
    assert inside == outside and (kind == "local" or len(set(inside)) == 1)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_step_in_inference_mode_are_ordinary_tensors(kind):
    def program(comm):
        model = net()
        optimizer = KINDS[kind](comm, model, INNER["SGD"](model))
        loss_of(model, batch(comm.rank, 0)).backward()
        with torch.inference_mode():
            optimizer.step()
        return [p.grad.is_inference() for p in model.parameters()]

    assert simulate(2, program).results == [[False] * 6] * 2
