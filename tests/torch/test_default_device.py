"""A default device that is another one than that of the model, as torch.set_default_device("cuda") in a script."""

import ast
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, loss_of, net  # noqa: E402
from one_bucket import OPTIONS  # noqa: E402
from tables import table  # noqa: E402
from torch.utils._device import _device_constructors  # noqa: E402

import sparsecoll.torch  # noqa: E402
from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import COMPRESSORS, DistributedOptimizer, LocalOptimizer, SparseSGD  # noqa: E402

PACKAGE = Path(sparsecoll.__file__).parent


def distributed(name, **options):

    def make(comm, model):
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9 * (name in ("none", "topk")))
        return DistributedOptimizer(inner, model.named_parameters(), comm, name, **OPTIONS, **options)

    return make


WAYS = {name: distributed(name, overlap=False) for name in COMPRESSORS} | {
    "overlap": distributed("topk"),
    "verify": distributed("none", verify=1),
    "SparseSGD": lambda comm, model: SparseSGD(model.parameters(), 0.1, momentum=0.9, comm=comm, density=0.1),
    "LocalOptimizer": lambda comm, model: LocalOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, comm, "topk", every=2
    ),
}
ROWS = {
    "SGD": lambda comm, model: DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, comm, overlap=False
    ),
    "SparseSGD": lambda comm, model: SparseSGD(model.parameters(), 0.1, comm=comm, density=0.5),
}


def same_as_without(program):
    """Run a program on ranks whose default device is that of their tensors, then on others."""

    def elsewhere(comm):
        return program(comm, "meta")

    assert simulate(3, elsewhere).results == simulate(3, lambda comm: program(comm, "cpu")).results


@pytest.mark.parametrize("name", WAYS)
def test_training_has_the_same_bits_whatever_the_default_device(name):
    def program(comm, device):
        model, data = net(seed=comm.rank, dtype=torch.float32), batch(comm.rank, 0, torch.float32)
        torch.set_default_device(device)  # of this rank's thread
        optimizer = WAYS[name](comm, model)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, data).backward()
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        return bits(model)

    same_as_without(program)


@pytest.mark.parametrize("name", ROWS)
def test_tables_have_the_same_bits_whatever_the_default_device(name):
    def program(comm, device):
        embedding = table()
        generator = torch.Generator().manual_seed(comm.rank)
        ids = torch.randint(50, (12,), generator=generator)
        torch.set_default_device(device)
        optimizer = ROWS[name](comm, embedding)
        for _ in range(3):
            optimizer.zero_grad()
            embedding(ids).square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        return bits(embedding)

    same_as_without(program)


def test_sums_have_the_same_bits_whatever_the_default_device():
    def program(comm, device):
        rows, values = torch.tensor([[comm.rank, 3]]), torch.ones(2, 4)
        inputs = [
            torch.arange(6.0),
            torch.sparse_coo_tensor(rows, values[:, 0], (5,)),
            torch.sparse_coo_tensor(rows, values, (5, 4)),
        ]
        torch.set_default_device(device)
        sums = [sparsecoll.allreduce(comm, x, "allgather", k=6) for x in inputs]
        return [y.to_dense().tolist() for y in sums]

    same_as_without(program)


def test_every_tensor_is_made_on_a_device_that_is_named():
    constructors = {f"torch.{function.__name__}" for function in _device_constructors()}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in constructors:
                assert "device" in {k.arg for k in node.keywords}, f"{path}:{node.lineno}: {ast.unparse(node)}"
