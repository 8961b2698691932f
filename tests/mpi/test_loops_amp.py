"""Mixed precision: GradScaler with and without overflows, and autocast, over MPI."""

import contextlib

import pytest
import torch
from runs import HOOK, LOCAL, ONE, OVERLAP, SPARSE, WAYS, Run, alike, bits, close, net

from sparsecoll.torch.compressors import TopKCompressor

pytestmark = [pytest.mark.mpi, pytest.mark.mpich, pytest.mark.usefixtures("process_group")]
TOPK = TopKCompressor(0.1, algo="allgather")


def single():
    return net().float()


def sgd(params):
    return torch.optim.SGD(params, 0.05)


def scaled(
    way,
    comm,
    steps,
    overflow=lambda step, rank: False,
    clip=None,
    compressor="none",
    enabled=True,
    parts=1,
    mean="before",
):
    """Train with a GradScaler; returns the run, and the scales of all steps. `mean`: when gradients are reduced."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=enabled)
    run = Run(way, comm, single, sgd, compressor, torch.float32, scaler if enabled else None)
    scales = []
    for step in range(steps):
        run.optimizer.zero_grad()
        for part in range(parts):
            loss = run.loss(step, part)
            if any(overflow(step, rank) for rank in run.ranks):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        if clip is not None:
            if mean == "before":
                run.mean()
            scaler.unscale_(run.optimizer)
            if mean == "after":
                run.mean()
            torch.nn.utils.clip_grad_norm_(run.params, clip)
        scaler.step(run.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    run.close()
    return run, scales


OVERFLOWS = {
    "nowhere": lambda last: lambda step, rank: False,
    "on one rank": lambda last: lambda step, rank: step in (0, 3, 4) and rank == last,
    "on all ranks": lambda last: lambda step, rank: step in (0, 3),
}


@pytest.mark.parametrize("compressor", ["none", "topk"])
@pytest.mark.parametrize(
    ("overflow", "clip"), [("nowhere", None), ("on one rank", None), ("on one rank", 0.2), ("on all ranks", 0.2)]
)
@pytest.mark.parametrize("way", (*WAYS, SPARSE))
def test_an_overflow_skips_the_step_on_all_ranks(comm, way, overflow, clip, compressor):
    if way == SPARSE and (clip is not None or compressor != "none"):
        return  # it clips each rank's gradient, and has no compressors
    where = OVERFLOWS[overflow](comm.size - 1)
    alone, scales = scaled(ONE, comm, 7, where, clip)
    run, own = scaled(way, comm, 7, where, clip, TOPK if compressor == "topk" else "none")
    assert own == scales
    assert alike(comm, run.values())
    if compressor == "none":
        close(run.values(), alone.values(), 1e-5)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("way", WAYS)
def test_residuals_do_not_know_of_the_scale(comm, way, clip):
    """Scales are powers of two and grow meanwhile, so that not a bit may differ."""
    plain, _ = scaled(way, comm, 7, clip=clip, compressor=TOPK, enabled=False, parts=2)
    run, scales = scaled(way, comm, 7, clip=clip, compressor=TOPK, parts=2)
    assert scales[-1] > scales[0]
    close(run.values(), plain.values(), 1e-6)
    for (name, t), (_, expected) in zip(residuals(run), residuals(plain), strict=True):
        torch.testing.assert_close(t, expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("compressor", "scale"), [(TOPK, 64.0), (TOPK, 1.0), ("none", 64.0)], ids=str)
def test_the_hook_refuses_a_scaler_that_residuals_do_not_know(comm, compressor, scale):
    run = Run(HOOK, comm, single, sgd, compressor, torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(run.loss(0)).backward()
    scaler.unscale_(run.optimizer)
    refused = pytest.raises(RuntimeError, match=r"HookState has to know the GradScaler .* pass grad_scaler=scaler to")
    with refused if scale != 1 and compressor == TOPK else contextlib.nullcontext():
        scaler.step(run.optimizer)


@pytest.mark.parametrize("mean", ["after", "never"])
@pytest.mark.parametrize("compressor", ["none", "topk"])
def test_gradients_that_are_still_local_may_be_unscaled(comm, compressor, mean):
    """overlap=False: what is clipped is each rank's gradient, or the mean after synchronize(), as without a scaler."""
    compressor = TOPK if compressor == "topk" else "none"
    where = OVERFLOWS["on one rank"](comm.size - 1)
    alone, scales = scaled(ONE, comm, 7, where, 0.2)
    run, own = scaled(LOCAL, comm, 7, where, 0.2, compressor, mean=mean)
    assert own == scales and alike(comm, run.values())
    if compressor == "none" and mean == "after":
        close(run.values(), alone.values(), 1e-5)
    plain, _ = scaled(LOCAL, comm, 7, clip=0.2, compressor=compressor, enabled=False, mean=mean)
    run, _ = scaled(LOCAL, comm, 7, clip=0.2, compressor=compressor, mean=mean)
    close(run.values(), plain.values(), 1e-6)
    for (name, t), (_, expected) in zip(residuals(run), residuals(plain), strict=True):
        torch.testing.assert_close(t, expected, rtol=1e-4, atol=1e-6, msg=name)


def residuals(run):
    state = run.state.state_dict() if run.way == HOOK else run.optimizer.state_dict()["sparsecoll"]
    return sorted(state["tensors"].get("residual", {}).items())


@pytest.mark.parametrize("way", (*WAYS, SPARSE))
def test_losses_under_autocast_train_as_one_process(comm, way):
    def train(way):
        run = Run(way, comm, single, sgd, "none", torch.float32)
        for step in range(4):
            run.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = run.loss(step)
            loss.backward()
            run.optimizer.step()
        run.close()
        return run.values()

    values = train(way)
    assert alike(comm, values)
    close(values, train(ONE), 2e-3)  # sums of bfloat16 products, in another order


@pytest.mark.parametrize("way", [OVERLAP, LOCAL])
def test_a_model_in_half_precision(comm, way):
    run = Run(way, comm, lambda: net().bfloat16(), sgd, TOPK, torch.bfloat16)
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        torch.nn.utils.clip_grad_norm_(run.params, 1.0)
        run.optimizer.step()
    run.close()
    assert alike(comm, run.values()) and bits(run.values())


def test_an_overflow_in_one_bucket_skips_the_steps_of_all_optimizers(comm):
    """DDP reduces the head's bucket first, when it has rebuilt them, and the first layer's gradient overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run = Run(HOOK, comm, single, sgd, TOPK, torch.float32, scaler, bucket_cap_mb=1e-4)
    head, body = (torch.optim.SGD(part.parameters(), 0.05) for part in (run.module[4], run.module[:4]))
    factors = [1.0, float("inf")]
    run.module[0].weight.register_hook(lambda g: g * (factors.pop(0) if comm.rank == run.last else 1.0))
    for step in range(2):
        before = run.values()
        run.model.zero_grad()
        scaler.scale(run.loss(step)).backward()
        for optimizer in (head, body):
            scaler.step(optimizer)
        scaler.update()
    assert all(p.grad.isnan().all() for p in run.params) and alike(comm, run.values())
    assert bits(run.values()) == bits(before) and scaler.get_scale() == 2.0**9
