"""LocalOptimizer where a worker is several ranks that share its parameters (fully_shard)."""

import copy

import pytest

torch = pytest.importorskip("torch")

from sharded_models import TORCHRUN, Net, W  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.errors import CommunicationError  # noqa: E402
from sparsecoll.torch import LocalOptimizer, load, save  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402

pytestmark = [pytest.mark.mpi, TORCHRUN, pytest.mark.usefixtures("process_group")]
WORKERS = 2 if W % 2 == 0 else W
STREAM = {"every": 4, "fragments": 2, "delay": 1, "alpha": 0.5}


def sharded():
    mesh = init_device_mesh("cpu", (WORKERS, W // WORKERS), mesh_dim_names=("worker", "shard"))
    model = Net()
    for part in (model.first, model.twice, model):
        fully_shard(part, mesh=mesh["shard"])
    return mesh, model


def whole(model):
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def made(model, comm, **options):
    inner = torch.optim.AdamW(model.parameters(), 0.01)
    options = {"every": 3, "outer_lr": 0.7, "outer_momentum": 0.9, "dense_below": 0, "timeout": 60, **options}
    return LocalOptimizer(inner, model, comm, **options)


def train(model, optimizer, worker, steps, start=0):
    for step in range(start, start + steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * worker + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, STREAM])
def test_it_trains_as_whole_models_do(comm, options):
    """The mean over a worker's ranks is that of fully_shard; all of them have its batch."""
    mesh, model = sharded()
    optimizer = made(model, mesh.get_group("worker"), **options)
    worker = mesh.get_local_rank("worker")
    train(model, optimizer, worker, 8)
    optimizer.synchronize()

    def program(own):
        net = Net()
        plain = made(net, own, **options)
        train(net, plain, own.rank, 8)
        plain.synchronize()
        return {name: p.detach().clone() for name, p in net.named_parameters()}

    expected = simulate(WORKERS, program).results[0] if comm.rank == 0 else None
    expected = comm.bcast(expected)
    for name, p in whole(model).items():
        torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-5)


def test_a_state_resumes_from_a_file_and_a_nan_is_discarded(comm, tmp_path):
    mesh, model = sharded()
    options = {"compressor": TopKCompressor(0.2, "allgather")}
    optimizer = made(model, mesh.get_group("worker"), **options)
    worker = mesh.get_local_rank("worker")
    train(model, optimizer, worker, 4)
    save(optimizer.state_dict(), tmp_path / "state.pt")
    values = copy.deepcopy(model.state_dict())
    train(model, optimizer, worker, 5, 4)
    optimizer.synchronize()
    expected = whole(model)
    _, again = sharded()
    again.load_state_dict(values)
    resumed = made(again, mesh.get_group("worker"), **options)
    again.load_state_dict(values)
    resumed.load_state_dict(load(tmp_path / "state.pt"))
    train(again, resumed, worker, 5, 4)
    resumed.synchronize()
    for name, p in whole(again).items():
        assert torch.equal(p, expected[name])
    train(again, resumed, worker, 1, 9)
    if worker == 0:
        with torch.no_grad():
            next(iter(again.parameters())).to_local().fill_(float("nan"))
    train(again, resumed, worker, 1, 10)
    resumed.discard()
    train(again, resumed, worker, 6, 11)
    assert all(p.isfinite().all() for p in whole(again).values())


@pytest.mark.skipif(W // WORKERS < 2, reason="needs shards")
def test_a_group_that_has_two_shards_of_a_worker_is_refused():
    _, model = sharded()
    with pytest.raises((ValueError, CommunicationError), match="comm: expected the group across workers"):
        made(model, torch.distributed.group.WORLD)
    with pytest.raises(TypeError, match="LocalOptimizer with the process group"):
        made(model, None)
