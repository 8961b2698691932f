"""Checkpoints of sharded models have the residuals, and load them in any layout."""

import pytest

torch = pytest.importorskip("torch")

from sharded_models import (  # noqa: E402
    MIDDLE,
    TORCHRUN,
    Linear,
    Net,
    W,
    attached,
    batch,
    train,
    whole,
)
from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard  # noqa: E402

import sparsecoll.torch.fsdp  # noqa: E402
from sparsecoll.torch.compressors import QSGD, efsignsgd  # noqa: E402

pytestmark = [pytest.mark.mpi, TORCHRUN, pytest.mark.usefixtures("process_group")]


@pytest.fixture
def path(comm, tmp_path_factory):
    """A folder for a checkpoint of all ranks."""
    return comm.bcast(str(tmp_path_factory.mktemp("checkpoint")))


def state_of(model, optimizer):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(model, optimizer, reductions, path):
    saved = reductions.state_dict()
    dcp.save({**state_of(model, optimizer), "sparsecoll": saved}, checkpoint_id=path)
    return saved


def resume(model, optimizer, reductions, path):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    reductions.load(path)


PAIRS = [(None, None), (None, 1), (MIDDLE, MIDDLE), (MIDDLE, W), (W, MIDDLE), (1, None)]


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_checkpoint_continues_with_any_layout(comm, path, old, new):
    """Bit for bit in the same one; in another the mean of the residuals is kept."""

    def place(p):  # in columns, if the ranks divide them
        return Shard(p.ndim - 1 if p.shape[-1] % W == 0 else 0)

    options = {"shard_placement_fn": place} if old == new else {}
    compressor = sparsecoll.torch.compressors.TopKCompressor(0.1, momentum=0.5)
    model, reductions = attached(old, compressor, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, comm.rank, range(2))
    saved = save(model, optimizer, reductions, path)
    train(model, optimizer, comm.rank, [2])
    expected = whole(model.parameters())
    model, reductions = attached(new, compressor, Net(seed=7), options=options)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    resume(model, optimizer, reductions, path)
    loaded = reductions.state_dict()
    assert loaded["step"] == 2
    for kind in ("residual", "velocity"):
        for name, t in loaded["tensors"][kind].items():
            before = saved["tensors"][kind][name].full_tensor().mean(0)
            assert before.any()
            torch.testing.assert_close(t.full_tensor().mean(0), before, atol=1e-7, rtol=1e-6)
    train(model, optimizer, comm.rank, [2])
    if new == old:
        assert all(map(torch.equal, whole(model.parameters()), expected))


@pytest.mark.parametrize("compressor", [efsignsgd(), QSGD(2, feedback=True)], ids=lambda c: c.name)
def test_what_pads_parameters_has_no_residual(comm, path, compressor):
    """Codes without a zero left one there, which no checkpoint has."""

    model, reductions = attached(MIDDLE, compressor)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, comm.rank, range(3))
    save(model, optimizer, reductions, path)
    train(model, optimizer, comm.rank, range(3, 6))
    expected = whole(model.parameters())
    model, reductions = attached(MIDDLE, compressor, Net(seed=7))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    resume(model, optimizer, reductions, path)
    train(model, optimizer, comm.rank, range(3, 6))
    assert all(map(torch.equal, whole(model.parameters()), expected))


@pytest.mark.parametrize(
    ("old", "new", "method"), [(None, None, "topk"), (None, W, "topk"), (W, None, "topk"), (W, W, "powersgd")]
)
def test_a_checkpoint_has_the_state_of_a_frozen_layer(comm, path, old, new, method):

    model, reductions = attached(old, method, Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, comm.rank, range(2))
    model.twice.requires_grad_(False)
    train(model, optimizer, comm.rank, [2])
    saved = save(model, optimizer, reductions, path)
    model.twice.requires_grad_(True)
    train(model, optimizer, comm.rank, [3])
    expected = whole(model.parameters())
    net = Net(seed=7)
    net.twice.requires_grad_(False)
    model, reductions = attached(new, method, net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    resume(model, optimizer, reductions, path)
    before, after = (s["tensors"]["residual"]["twice.weight"].full_tensor() for s in (saved, reductions.state_dict()))
    assert before.any()
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=1e-7, rtol=1e-6)
    model.twice.requires_grad_(True)
    train(model, optimizer, comm.rank, [3])
    if new == old:
        assert all(map(torch.equal, whole(model.parameters()), expected))


@pytest.mark.parametrize(("old", "new"), [(MIDDLE, W), (1, MIDDLE), (1, W)])
def test_factors_of_other_shapes_begin_anew(comm, path, old, new):
    """Parameters of which smaller shards were not worth factors have some now; residuals stay."""
    model, reductions = attached(old, "powersgd", Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, comm.rank, range(2))
    saved = save(model, optimizer, reductions, path)
    model, reductions = attached(new, "powersgd", Net(seed=7))
    resume(model, torch.optim.SGD(model.parameters(), 0.1), reductions, path)
    after = reductions.state_dict()["tensors"]["residual"]
    for name, t in saved["tensors"]["residual"].items():
        torch.testing.assert_close(after[name].full_tensor().mean(0), t.full_tensor().mean(0), atol=1e-7, rtol=1e-6)


def test_a_layer_that_was_never_trained_has_no_state(comm, path, caplog):
    """Where it is trained when the checkpoint is loaded, its residual is zero, and rank 0 warns."""
    net = Linear()
    net.b.requires_grad_(False)
    model, reductions = attached(MIDDLE, "topk", net)
    train_sum(model, comm.rank)
    dcp.save({"sparsecoll": reductions.state_dict()}, checkpoint_id=path)
    for frozen in (True, False):
        model, other = attached(MIDDLE, "topk", Linear())
        train_sum(model, comm.rank)
        model.b.requires_grad_(not frozen)
        other.load(path)
        residual = other.state_dict()["tensors"]["residual"]
        assert set(residual) == {"a.weight", "a.bias", *(() if frozen else ("b.weight", "b.bias"))}
        assert all(t.full_tensor().any() == name.startswith("a.") for name, t in residual.items())
        warns = comm.rank == 0 and not frozen
        assert ("checkpoint: expected state of 'b.weight', 'b.bias', got none" in caplog.text) == warns


def train_sum(model, rank):
    model(batch(rank, 0)[0]).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def test_a_checkpoint_without_this_state_is_refused(comm, path):

    _, reductions = attached(1, "topk")
    dcp.save({"sparsecoll": reductions.state_dict()}, checkpoint_id=path)
    with pytest.raises(ValueError, match=r"^rank 0: key: expected one that the checkpoint has, got 'residuals'"):
        reductions.load(path, key="residuals")
    _, other = attached(W, "efsignsgd")
    with pytest.raises(ValueError, match=r"checkpoint: expected the state of compressor efsignsgd.*, got that of topk"):
        other.load(path)
    _, other = attached(1, "topk", Linear())
    with pytest.raises(ValueError, match=r"checkpoint: expected residual of 'a\.weight', got none"):
        other.load(path)


def test_some_of_the_ranks_may_load_a_model_of_their_own(comm, path):
    """As an actor on one half of the ranks and a critic on the other."""
    half = [*range((W + 1) // 2)]
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", half)
    if comm.rank in half:
        for load in (False, True):
            model = Net()
            torch.distributed.fsdp.fully_shard(model, mesh=mesh)
            reductions = sparsecoll.torch.fsdp.attach(model, compressor="topk")
            if load:
                reductions.load(path)
                break
            model(batch(comm.rank, 0)[0]).square().sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            saved = reductions.state_dict()
            dcp.save({"sparsecoll": saved}, checkpoint_id=path, process_group=mesh.get_group())
        for kind, own in reductions.state_dict()["tensors"].items():
            assert all(torch.equal(t.to_local(), saved["tensors"][kind][name].to_local()) for name, t in own.items())
    comm.Barrier()
