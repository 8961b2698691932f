"""What goes wrong around a training loop, over MPI: heard by all ranks, or undone; and wrappers that come and go."""

import pytest
import torch
from runs import LOCAL, ONE, OPTIONS, OVERLAP, SPARSE, Run, alike, bits, close, draw, net, plain_sgd, sgd, train

import sparsecoll
import sparsecoll.torch
from sparsecoll.torch import DistributedOptimizer
from sparsecoll.torch.compressors import TopK
from sparsecoll.transport import as_transport

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("process_group")]
TOPK = TopK(0.1, algo="allgather")


class Fails(torch.optim.SGD):
    bad = False

    def step(self, closure=None):
        if self.bad:
            raise MemoryError("step")
        return super().step(closure)


def test_the_wrapped_optimizer_raises_on_one_rank(comm):
    """All ranks hear of it in the next reduction: their parameters differ, and `move` brings them together again."""
    run = train(Run(OVERLAP, comm, net, lambda params: Fails(params, 0.1), TOPK), range(2))
    Fails.bad = comm.rank == comm.size - 1
    failed = False
    try:
        train(run, [2])
    except MemoryError:
        failed = True
    Fails.bad = False
    assert failed == (comm.rank == comm.size - 1)
    if comm.size > 1:
        with pytest.raises(sparsecoll.CommunicationError, match=r"verify|steps"):
            train(run, [3])
    run.optimizer.move(comm)
    train(run, range(4, 6))
    assert alike(comm, run.values())
    run.close()


def test_the_wrapped_optimizer_raises_on_all_ranks(comm):
    run = train(Run(OVERLAP, comm, net, lambda params: Fails(params, 0.1)), range(2))
    Fails.bad = True
    with pytest.raises(MemoryError):
        train(run, [2])
    Fails.bad = False
    train(run, range(2, 5))
    alone = train(Run(ONE, comm, net, lambda params: Fails(params, 0.1)), range(5))
    assert alike(comm, run.values())
    close(run.values(), alone.values())
    run.close()


@pytest.mark.parametrize("way", [OVERLAP, LOCAL, SPARSE])
def test_uneven_inputs_with_join(comm, way):
    """Rank r has 2 + r batches; the sums are divided by all ranks throughout. Another epoch follows."""
    run = Run(way, comm, net, sgd)
    alone = Run(ONE, comm, net, sgd)
    for epoch in range(2):
        with run.optimizer.join():
            train(run, range(10 * epoch, 10 * epoch + 2 + comm.rank))
        for step in range(1 + comm.size):
            alone.ranks = [rank for rank in range(comm.size) if step < 2 + rank]
            alone.optimizer.zero_grad()
            (alone.loss(10 * epoch + step) * (len(alone.ranks) / comm.size)).backward()
            alone.optimizer.step()
        assert alike(comm, run.values())
    close(run.values(), alone.values())
    run.close()


@pytest.mark.parametrize("way", [OVERLAP, LOCAL, SPARSE])
def test_an_exception_that_leaves_join_on_one_rank_is_raised_on_all(comm, way):
    """Rank 0 waits at the end of the block for the others, who wait in a reduction for the last rank."""
    run, last, text = Run(way, comm, net, sgd), comm.size - 1, None
    try:
        with run.optimizer.join():
            train(run, range(2))
            if comm.rank == last:
                raise KeyError("mine")
            train(run, range(2, 2 + comm.rank))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    failed = "KeyError: 'mine'"
    assert text == (failed if comm.rank == last else f"CommunicationError: rank {last} failed: {failed}")
    train(run, range(4, 6))
    assert alike(comm, run.values())
    run.close()


@pytest.mark.parametrize("way", [OVERLAP, SPARSE])
def test_buffers_in_join_are_those_of_the_lowest_rank_that_has_data(comm, way):
    """Rank 0 runs out of data first; from then on its running statistics are of no step that is taken."""
    counts = [2, *range(comm.size + 2, 3, -1)]

    def normed():
        layers = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)
        return torch.nn.Sequential(*layers).double()

    run, expected = Run(way, comm, normed, sgd), normed()
    with run.optimizer.join():
        train(run, range(counts[comm.rank]))
    for step in range(max(counts)):
        expected(draw(next(rank for rank, count in enumerate(counts) if step < count), step)[0])
    close(dict(run.module.named_buffers()), dict(expected.named_buffers()))
    assert alike(comm, run.values())
    run.close()


def test_a_wrapper_that_replaces_another(comm):
    """A notebook's cell is run again: the old one's hooks do nothing any more."""
    run = train(Run(OVERLAP, comm, net, sgd, TOPK), range(3))
    alone = Run(ONE, comm, net, sgd)
    alone.module.load_state_dict(run.module.state_dict())
    run.inner = sgd(run.params)
    run.optimizer = DistributedOptimizer(run.inner, run.module, comm, "none", **OPTIONS)
    train(run, range(3, 6))
    train(alone, range(3, 6))
    assert alike(comm, run.values())
    close(run.values(), alone.values())
    run.close()


@pytest.mark.parametrize("compressor", ["none", TOPK])
def test_of_two_networks_on_one_communicator_a_rank_may_leave_one_out(comm, compressor):
    """They have the same shapes, so that the sum of both would pass unnoticed."""
    torch.manual_seed(comm.rank)
    models = [net(), net()]
    optimizers = [DistributedOptimizer(plain_sgd(m.parameters()), m, comm, compressor, **OPTIONS) for m in models]
    for step in range(4):
        used = models[1:] if step == 2 and 0 < comm.rank == comm.size - 1 else models
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [[m(draw(rank, step)[0]).square().mean() for m in models] for rank in range(comm.size)]
        if comm.size > 1 and step == 2:
            losses[-1] = losses[-1][1:]
        if compressor == "none":  # every rank computes the mean of all
            expected = torch.autograd.grad(
                sum(map(sum, losses)) / comm.size, [p for m in models for p in m.parameters()]
            )
        sum(m(draw(comm.rank, step)[0]).square().mean() for m in used).backward()
        if compressor == "none":
            for p, gradient in zip((p for m in models for p in m.parameters()), expected, strict=True):
                torch.testing.assert_close(p.grad, gradient)
        for optimizer in optimizers:
            optimizer.step()
    for model, optimizer in zip(models, optimizers, strict=True):
        assert alike(comm, dict(model.named_parameters()))
        optimizer.close()


def test_an_optimizer_that_is_gone_no_longer_shares_the_communicator(comm):
    """It would keep buckets from being sent early. On the last rank it is garbage that nobody has collected."""
    own = comm.Dup()
    for last in (False, True):
        model = net()
        optimizer = DistributedOptimizer(plain_sgd(model.parameters()), model, own, **OPTIONS)
        assert len(as_transport(own).sharers) == 1
        if not last and comm.rank == comm.size - 1:
            optimizer.cycle = optimizer
        del optimizer
    own.Free()


def test_move_to_the_same_communicator_reduces_once(comm):
    """An optimizer that counted as two would select from the mean once more."""
    trained = []
    for moves in (0, 2):
        run = Run(OVERLAP, comm, net, plain_sgd, TOPK)
        for step in range(4):
            if step == 2:
                for _ in range(moves):
                    run.optimizer.move(comm)
            train(run, [step])
        trained.append(bits(run.values()))
        run.close()
    assert trained[0] == trained[1]


def test_a_closed_wrapper_steps_on_its_own(comm):
    run = train(Run(OVERLAP, comm, net, plain_sgd), range(2))
    own = net()
    own.load_state_dict(run.module.state_dict())
    run.close()
    messages = run.optimizer.traffic.total.messages_sent
    train(run, [2])
    assert run.optimizer.traffic.total.messages_sent == messages
    x, y = draw(comm.rank, 2)
    torch.nn.functional.mse_loss(own(x), y).backward()
    plain_sgd(own.parameters()).step()
    for p, q in zip(run.params, own.parameters(), strict=True):
        assert torch.equal(p, q)


class Modes(torch.optim.SGD):
    """As schedule-free optimizers have them."""

    mode = ""

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"


def test_hooks_groups_and_attributes_of_the_wrapped(comm):
    run = Run(OVERLAP, comm, net, lambda params: Modes(params, 0.1))
    calls = []
    handles = [
        run.optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        run.optimizer.register_step_post_hook(lambda *_: calls.append("post")),
    ]
    run.optimizer.train()
    assert run.inner.mode == "train" and run.optimizer.mode == "train"
    train(run, range(2))
    assert calls == ["pre", "post"] * 2
    for handle in handles:
        handle.remove()
    groups = [{**run.optimizer.param_groups[0], "lr": 0.5}]
    run.optimizer.param_groups = groups
    assert run.inner.param_groups is groups
    train(run, [2])
    assert calls == ["pre", "post"] * 2 and isinstance(run.optimizer, torch.optim.Optimizer)
    run.close()


def test_buffers_of_batchnorm_and_frozen_parameters(comm):
    def model():
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1).requires_grad_(False)
        ).double()

    run = Run(OVERLAP, comm, model, lambda params: sgd([p for p in params if p.requires_grad]), TOPK, verify=1)
    assert alike(comm, run.values())
    train(run, range(4))
    assert alike(comm, run.values())
    x, _ = draw(0, 99)
    run.model.eval()
    assert alike(comm, {"out": run.model(x).detach()})
    run.model.train()
    if comm.size > 1:
        if comm.rank == 1:
            run.module[1].running_mean.data[3] += 1.0
        run.optimizer.zero_grad()
        run.module.eval()
        run.loss(5).backward()
        run.optimizer.step()
        assert alike(comm, run.values())  # a buffer is set to rank 0's whoever has changed it
        if comm.rank == 1:
            run.module[0].bias.data[3] += 1.0
        run.optimizer.zero_grad()
        run.loss(6).backward()
        with pytest.raises(sparsecoll.CommunicationError, match=r"'0\.bias' on rank 1"):
            run.optimizer.step()
    run.close()


def test_the_loop_of_the_dcgan_tutorial(comm):
    """netD steps on two back-propagations, netG on one that goes through netD, whose gradients are thrown away."""

    def gan(way):
        torch.manual_seed(0 if way == ONE else comm.rank)
        nets = [net(), torch.nn.Sequential(torch.nn.Linear(1, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1)).double()]
        ranks = range(comm.size) if way == ONE else [comm.rank]
        g, d = nets
        inner = [torch.optim.Adam(m.parameters(), 0.01, betas=(0.5, 0.999)) for m in nets]
        if way != ONE:
            inner = [DistributedOptimizer(o, m, comm, "none", **OPTIONS) for o, m in zip(inner, nets, strict=True)]
        optimizer_g, optimizer_d = inner

        def loss(out, label):
            return torch.nn.functional.binary_cross_entropy_with_logits(out, torch.full_like(out, label))

        for step in range(5):
            data = [draw(rank, step) for rank in ranks]
            d.zero_grad()
            sum(loss(d(y), 1.0) for _, y in data).div(len(data)).backward()
            fake = [g(x) for x, _ in data]
            sum(loss(d(f.detach()), 0.0) for f in fake).div(len(data)).backward()
            optimizer_d.step()
            g.zero_grad()
            sum(loss(d(f), 1.0) for f in fake).div(len(data)).backward()
            optimizer_g.step()
        if way != ONE:
            for optimizer in inner:
                optimizer.close()
        return {f"{i}.{name}": p.detach() for i, m in enumerate(nets) for name, p in m.named_parameters()}

    values = gan(OVERLAP)
    assert alike(comm, values)
    close(values, gan(ONE))


def test_clipping_each_ranks_gradient(comm):
    """overlap=False without synchronize(): what is done to gradients before step() is done before they are sent."""
    run = Run(LOCAL, comm, net, plain_sgd)
    expected = net()
    expected.load_state_dict(run.module.state_dict())
    run.loss(0).backward()
    torch.nn.utils.clip_grad_norm_(run.params, 0.05)
    run.optimizer.step()
    run.close()
    clipped = []
    for rank in range(comm.size):
        expected.zero_grad()
        x, y = draw(rank, 0)
        torch.nn.functional.mse_loss(expected(x), y).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        clipped.append([p.grad for p in expected.parameters()])
    for p, q, *grads in zip(run.params, expected.parameters(), *clipped, strict=True):
        torch.testing.assert_close(p.detach(), q.detach() - 0.1 * sum(grads) / comm.size)


def test_ranks_that_skip_differently_are_told(comm):
    """A rank that skips a step by its own loss: all hear of it, and none hangs."""
    if comm.size == 1:
        return
    run = train(Run(LOCAL, comm, net, sgd, TOPK), range(2))
    with pytest.raises(sparsecoll.CommunicationError, match="steps: expected every rank to take or skip the same ones"):
        for step in range(2, 6):
            run.optimizer.zero_grad()
            run.loss(step).backward()
            run.optimizer.synchronize()
            if step == 3 and comm.rank == 1:
                run.optimizer.zero_grad()
                continue
            run.optimizer.step()
    run.close()
