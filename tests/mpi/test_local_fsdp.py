"""LocalOptimizer where a worker is several ranks that share its parameters (fully_shard)."""

import copy

import pytest

torch = pytest.importorskip("torch")

from sharded_models import TORCHRUN, Net, W  # noqa: E402
from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.errors import CommunicationError, NonFiniteError  # noqa: E402
from sparsecoll.torch import LocalOptimizer, OneBitAdam, load, redistribute, save  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402

pytestmark = [pytest.mark.mpi, TORCHRUN, pytest.mark.usefixtures("process_group")]
WORKERS = 2 if W % 2 == 0 else W
STREAM = {"every": 4, "fragments": 2, "delay": 1, "alpha": 0.5}


def sharded(shape=(WORKERS, W // WORKERS), seed=0):
    """A mesh of the first ranks, workers * shards, and a model on it; on the other ranks no model."""
    ranks = torch.arange(shape[0] * shape[1]).view(shape)
    mesh, model = DeviceMesh("cpu", ranks, mesh_dim_names=("worker", "shard")), Net(seed)
    if mesh.get_coordinate() is None:
        return mesh, None
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
@pytest.mark.parametrize("options", [{}, STREAM])
def test_no_rank_of_a_worker_takes_a_mean_that_fails_for_another_shard(comm, options):
    mesh, model = sharded()
    optimizer = made(model, mesh.get_group("worker"), **options)
    worker, before = mesh.get_local_rank("worker"), whole(model)
    train(model, optimizer, worker, options.get("every", 3) // options.get("fragments", 1) - 1)
    model(torch.ones(4, 6)).square().mean().backward()
    if comm.rank == W - 1:
        for p in model.parameters():
            p.grad.to_local().fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        optimizer.step()
        optimizer.synchronize()
    optimizer.discard()
    for name, p in whole(model).items():
        assert torch.equal(p, before[name])


@pytest.mark.skipif(W != 4, reason="needs 2 workers with 2 shards")
def test_a_first_mean_that_fails_for_one_shard_raises_on_all_ranks_of_a_worker(comm):
    """Where one shard differs between workers."""
    mesh, model = sharded()
    optimizer = made(model, mesh.get_group("worker"))
    worker = mesh.get_local_rank("worker")
    if worker == 1 and mesh.get_local_rank("shard") == 0:
        with torch.no_grad():
            next(model.parameters()).to_local().add_(1.0)
    with pytest.raises(CommunicationError, match=r"same bits|another shard"):
        train(model, optimizer, worker, 3)


def state_of(optimizer):
    """Whole tensors of the state of a worker: residuals, the parameters at the last mean and now, all momenta."""
    state = optimizer.state_dict()
    local, inner = state["sparsecoll_local"], state["state"]
    momenta = [entry for own in (inner, local["outer"]["state"]) for entry in own.values()]
    parts = [state["sparsecoll"]["tensors"].get("residual", {}), local["shared"], local["own"], *momenta]
    return [{name: t.full_tensor() for name, t in part.items() if t.dim()} for part in parts]


@pytest.mark.skipif(W != 4, reason="needs 2 workers with 2 shards")
@pytest.mark.parametrize(
    ("method", "options", "shape"),
    [("none", {}, (2, 1)), ("none", STREAM, (2, 1)), *(("topk", {}, shape) for shape in [(2, 2), (2, 1), (1, 3)])],
)
def test_a_checkpoint_of_torch_is_loaded_on_another_mesh(comm, tmp_path_factory, method, options, shape):
    options = {**options, "compressor": TopKCompressor(0.2, "allgather") if method == "topk" else "none"}
    path = comm.bcast(str(tmp_path_factory.mktemp("checkpoint")))
    mesh, model = sharded()
    optimizer = made(model, mesh.get_group("worker"), **options)
    worker = mesh.get_local_rank("worker")
    train(model, optimizer, worker, 5)  # no mean is under way
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=f"{path}/{worker}", process_group=mesh.get_group("shard"))
    before = [comm.bcast(state_of(optimizer), root=2 * i) for i in range(2)]
    train(model, optimizer, worker, 5, 5)
    optimizer.synchronize()
    expected = whole(model)

    mesh, again = sharded(shape, seed=7)
    if again is None:
        return
    worker = mesh.get_local_rank("worker")
    loaded = {"model": again.state_dict()}
    dcp.load(loaded, checkpoint_id=f"{path}/{worker}", process_group=mesh.get_group("shard"))
    resumed = made(again, mesh.get_group("worker"), **options)
    again.load_state_dict(loaded["model"])
    states = [resumed.read(f"{path}/{i}") for i in range(2)]
    resumed.load_state_dict(states[worker] if shape[0] == 2 else redistribute(states, worker, 1))
    for i, part in enumerate(state_of(resumed)):
        assert part.keys() == before[0][i].keys()
        for name, t in part.items():
            mine = [own[i][name] for own in before]
            torch.testing.assert_close(t, mine[worker] if shape[0] == 2 or i > 2 else sum(mine) / 2)
    train(again, resumed, worker, 5, 5)
    resumed.synchronize()
    for name, p in whole(again).items():
        if shape == (2, 2) or (shape[0] == 2 and method == "none"):  # which depends on the shards
            torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(W != 4, reason="needs 2 workers with 2 shards")
def test_a_checkpoint_of_torch_is_read_for_whole_models_and_other_states_are_refused(comm, tmp_path_factory):
    path = comm.bcast(str(tmp_path_factory.mktemp("checkpoint")))
    mesh, model = sharded()
    optimizer = made(model, mesh.get_group("worker"))
    worker = mesh.get_local_rank("worker")
    train(model, optimizer, worker, 4)
    state = optimizer.state_dict()
    dcp.save({"optimizer": state}, checkpoint_id=f"{path}/{worker}", process_group=mesh.get_group("shard"))
    plain = made(Net(seed=7), mesh.get_group("worker"))
    plain.load_state_dict(plain.read(f"{path}/{worker}"))
    for name, t in plain.state_dict()["sparsecoll_local"]["own"].items():
        assert torch.equal(t, state["sparsecoll_local"]["own"][name].full_tensor())
    with pytest.raises(ValueError, match="checkpoint_id: expected a checkpoint of torch"):
        optimizer.read(f"{path}/none")
    with pytest.raises(ValueError, match="key: expected one that has the state of a LocalOptimizer"):
        optimizer.read(f"{path}/{worker}", key="model")
    with pytest.raises(CommunicationError, match="expected that of the shard at"):
        plain.load_state_dict(state)
    optimizer.load_state_dict(optimizer.read(f"{path}/{worker}"))
    optimizer.state[next(model.parameters())]["exp_avg"] = torch.ones(7)
    dcp.save(
        {"optimizer": optimizer.state_dict()}, checkpoint_id=f"{path}/{worker}", process_group=mesh.get_group("shard")
    )
    with pytest.raises(ValueError, match="expected the shape"):
        optimizer.read(f"{path}/{worker}")


@pytest.mark.skipif(W // WORKERS < 2, reason="needs shards")
def test_a_group_that_has_two_shards_of_a_worker_is_refused():
    _, model = sharded()
    with pytest.raises((ValueError, CommunicationError), match="comm: expected the group across workers"):
        made(model, torch.distributed.group.WORLD)
    with pytest.raises(TypeError, match="LocalOptimizer with the process group"):
        made(model, None)
    with pytest.raises(TypeError, match="params: expected whole tensors on every rank"):
        OneBitAdam(model.parameters(), comm=torch.distributed.group.WORLD, warm_up=6)
    mesh, model = sharded()
    made(model, mesh["worker"])
