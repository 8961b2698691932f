"""Parameters and buffers stay the same on all ranks; who steps a parameter reduces it; or an error is raised."""

import gc
import io
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, loss_of, net, train  # noqa: E402

from sparsecoll import CommunicationError, simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, HookState, LocalOptimizer, SparseSGD, broadcast  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402
from sparsecoll.torch.tensors.model import are_equal  # noqa: E402


def wrapped(model, comm, compressor="none", **options):
    inner = torch.optim.SGD(model.parameters(), 0.1)
    return DistributedOptimizer(inner, model, comm, compressor, **options)


def sparse(model, comm, **options):
    return SparseSGD(model.parameters(), 0.1, comm=comm, **options)


def local(model, comm):
    return LocalOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, every=1)


class Centred(torch.nn.Module):
    """Subtracts a running mean, which the forward pass changes in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way, self.layer = way, net()
        self.register_buffer("mean", torch.zeros(12, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(12, dtype=torch.float64))

    def forward(self, x):
        new = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.way == "assigned":
            self.mean = new
        elif self.way == "data":
            self.mean.data.copy_(new)
        elif self.way == "late" and not hasattr(self, "count"):
            self.register_buffer("count", x[0].detach().clone())
        elif self.way == "kernel":
            x = torch.nn.functional.batch_norm(x, self.mean, self.variance, training=True)
        return self.layer(x - self.mean)


@pytest.mark.parametrize("make", [wrapped, sparse, local])
@pytest.mark.parametrize("way", ["assigned", "data", "late", "kernel"])
def test_buffers_are_the_same_however_a_forward_pass_changes_them(make, way):
    def program(comm):
        model = Centred(way)
        optimizer = (
            make(model, comm) if make is not sparse else SparseSGD(model.parameters(), 0.1, comm=comm, model=model)
        )
        train(comm, model, optimizer, range(3))
        return bits(model), [b.tolist() for b in model.buffers()]

    first, *others = simulate(3, program).results
    assert all(other == first for other in others)


def test_buffers_that_were_converted_or_added_after_wrapping_are_kept_the_same():
    def program(comm):
        model = net()
        model.register_buffer("spare", torch.zeros(2))
        optimizer = wrapped(model, comm)
        train(comm, model, optimizer, range(2))
        model.spare = model.spare.double() + comm.rank
        model.append(torch.nn.BatchNorm1d(3).double())
        optimizer.add_param_group({"params": model[-1].parameters()})
        train(comm, model, optimizer, range(2, 5))
        return bits(model), [b.tolist() for b in model.buffers()]

    first, *others = simulate(3, program).results
    assert all(other == first for other in others)


def test_buffers_that_nobody_has_changed_are_not_sent_again():
    """Neither after the start, nor after one rank has changed one."""

    def program(comm):
        model = net()
        model.register_buffer("spare", torch.full((5,), float(comm.rank)))
        optimizer = wrapped(model, comm)
        sent = [optimizer.traffic.phases["broadcast"].messages_received]
        for step in range(4):
            if step == 2 and comm.rank == 1:
                model.spare.data += 1
            train(comm, model, optimizer, [step])
            sent.append(optimizer.traffic.phases["broadcast"].messages_received)
        return sent, model.spare.tolist()

    for sent, values in simulate(3, program).results[1:]:
        assert sent[0] == sent[1] == sent[2] < sent[3] == sent[4] and values == [0.0] * 5


def test_buffers_that_cannot_be_sent_leave_gradients_as_they_were():
    """They were means already, and the reduction did not end."""

    def program(comm, fails):
        model, alone = net(), net()
        inner, topk = torch.optim.SGD(model.parameters(), 0.1), TopKCompressor(0.1, algo="allgather")
        optimizer = DistributedOptimizer(inner, model, comm, topk, dense_below=0)
        train(comm, model, optimizer, range(2))
        if fails:
            alone.load_state_dict(model.state_dict())
            loss_of(alone, batch(comm.rank, 2)).backward()
            model.register_buffer("spare", torch.zeros(3 + comm.rank))
            optimizer.zero_grad()
            with pytest.raises(CommunicationError, match="spare"):
                loss_of(model, batch(comm.rank, 2)).backward()
            assert all(map(torch.equal, (p.grad for p in model.parameters()), (p.grad for p in alone.parameters())))
            del model.spare
            optimizer.step()
        train(comm, model, optimizer, range(2 + fails, 5))
        return bits(model)

    failed, undisturbed = (simulate(2, partial(program, fails=fails)).results for fails in (True, False))
    assert failed == undisturbed


BUFFERS = {  # by a word of the error
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "resolve_conj": lambda: torch.conj(torch.ones(3, dtype=torch.complex64)),
    "resolve_neg": lambda: torch._neg_view(torch.ones(3)),
    "clone": lambda: torch.arange(3.0).expand(4, 3),
}


@pytest.mark.parametrize("word", BUFFERS)
@pytest.mark.parametrize("wrap", [wrapped, local])
def test_buffers_that_ranks_cannot_keep_the_same_are_refused(wrap, word):
    def program(comm):
        model = net()
        model.register_buffer("b", BUFFERS[word]())
        with pytest.raises((TypeError, ValueError), match=rf"buffer 'b': .*{word}"):
            wrap(model, comm)

    simulate(2, program)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_is_reduced_by_the_optimizer_that_steps_it(overlap):
    """As in a GAN whose optimizers are both given the whole model."""

    def program(comm):
        model = torch.nn.ModuleDict({"G": torch.nn.Linear(12, 12), "D": net(dtype=torch.float32)})
        inner = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}
        both = {
            name: DistributedOptimizer(own, model.named_parameters(), comm, "none", overlap=overlap)
            for name, own in inner.items()
        }
        for step in range(4):
            x, y = batch(comm.rank, step, torch.float32)
            optimizer = both["GD"[step % 2]]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model["D"](model["G"](x)), y).backward()
            optimizer.step()
        return bits(model)

    assert len(set(simulate(3, program).results)) == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_an_optimizer_that_another_one_has_replaced_raises_when_it_steps(overlap):
    def program(comm):
        model = net()
        first = wrapped(model, comm, overlap=overlap)
        second = wrapped(model, comm, overlap=overlap)
        train(comm, model, second, range(2))  # as when a cell of a notebook is run again
        with pytest.raises(RuntimeError, match=r"'0\.weight' is also updated by"):
            train(comm, model, first, range(2))
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


def test_a_step_of_the_wrapped_optimizer_is_refused():
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model, comm)
        loss_of(model, batch(comm.rank, 0)).backward()
        with pytest.raises(RuntimeError, match="of a wrapped optimizer"):
            inner.step()
        optimizer.close()
        inner.step()

    simulate(2, program)


def test_a_step_without_the_optimizer_that_has_wrapped_it_is_refused():
    """Unless it was closed, or another one has come in its place."""

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        DistributedOptimizer(inner, model, comm, "none")  # nobody keeps it
        gc.collect()
        loss_of(model, batch(comm.rank, 0)).backward()
        with pytest.raises(RuntimeError, match=r"DistributedOptimizer is gone.*keep the"):
            inner.step()
        optimizer = DistributedOptimizer(inner, model, comm, "none")
        train(comm, model, optimizer, range(2))
        own = net()
        closed = torch.optim.SGD(own.parameters(), 0.1)
        DistributedOptimizer(closed, own, comm, "none").close()
        closed.step()
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


def test_learning_rates_that_differ_between_ranks_are_refused():
    def program(comm):
        model = net()
        optimizer = wrapped(model, comm)
        train(comm, model, optimizer, range(2))
        optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * comm.rank
        with pytest.raises(CommunicationError, match=r"lr of param_groups\[0\]: expected the same value"):
            train(comm, model, optimizer, range(1))

    simulate(2, program)


def test_the_hooks_replicas_are_compared_when_asked_to():
    def program(comm):
        model = net()
        state = HookState(comm, "none", model)
        state.verify()
        if comm.rank == 2:
            model[2].bias.data[0] += 1
        with pytest.raises(CommunicationError, match=r"got others than rank 0's in '2\.bias' on rank 2"):
            state.verify()

    simulate(3, program)


def test_a_local_optimizer_shares_parameters_that_the_wrapped_one_was_given():
    def program(comm):
        model, late = net(), torch.nn.Linear(3, 3).double()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = LocalOptimizer(inner, model, comm, every=2)
        whole = torch.nn.Sequential(model, late)
        torch.nn.init.normal_(late.weight, generator=torch.Generator().manual_seed(comm.rank))
        train(comm, whole, optimizer, range(1))
        inner.add_param_group({"params": list(late.parameters())})
        train(comm, whole, optimizer, range(1, 4))
        return bits(whole)

    assert len(set(simulate(3, program).results)) == 1


def test_parameters_that_were_converted_after_wrapping_are_refused():
    def program(comm):
        model = net(dtype=torch.float32)
        optimizer = wrapped(model, comm)
        train(comm, model, optimizer, range(2), torch.float32)
        model.double()
        with pytest.raises(ValueError, match="convert a model before you wrap"):
            train(comm, model, optimizer, range(1))

    simulate(2, program)


def test_a_module_that_scales_the_rows_it_looks_up_is_refused():
    def program(comm):
        for make in (wrapped, local):
            with pytest.raises(ValueError, match="Embedding '0': expected max_norm=None"):
                make(torch.nn.Sequential(torch.nn.Embedding(9, 3, max_norm=1.0)), comm)
        for given in (lambda model: model, torch.nn.Module.named_parameters):
            with pytest.raises(ValueError, match="Embedding '0': expected max_norm=None"):
                HookState(comm, "none", given(torch.nn.Sequential(torch.nn.Embedding(9, 3, max_norm=1.0))))

    simulate(2, program)


@pytest.mark.parametrize("by_hand", [False, True])
def test_buffers_that_forward_passes_have_changed_since_are_not_compared(by_hand):
    """The passes of the next step of a loop that updates by hand, or those after back-propagation."""

    def program(comm):
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).double()
        optimizer = wrapped(model, comm, verify=1)
        for step in range(3):
            x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if by_hand:
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(p.grad)
                continue
            model(x)
            optimizer.step()
        with torch.no_grad():
            model[0].bias[3] += comm.rank
        optimizer.zero_grad()
        with pytest.raises(CommunicationError, match=r"'0\.bias' on rank 1"):
            model(x).square().mean().backward()
            optimizer.step()

    simulate(2, program)


def test_a_model_can_be_saved_whole():
    def program(comm):
        model = net()
        optimizer = wrapped(model, comm)
        train(comm, model, optimizer, range(1))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return bits(torch.load(file, weights_only=False)) == bits(model)

    assert all(simulate(2, program).results)


def test_complex_parameters_are_refused_with_the_cure():
    def program(comm):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        with pytest.raises(TypeError, match=r"got torch.complex64: keep real numbers.*view_as_complex"):
            DistributedOptimizer(torch.optim.SGD([p], 0.1), [("p", p)], comm)

    simulate(2, program)


@pytest.mark.parametrize("make", [partial(wrapped, verify=1), partial(sparse, verify=1)], ids=["wrapped", "SparseSGD"])
def test_ranks_that_have_left_join_are_not_compared(make):
    def program(comm):
        model = net(seed=comm.rank)
        optimizer = make(model, comm)
        with optimizer.join():
            train(comm, model, optimizer, range(2 + 3 * comm.rank))
        train(comm, model, optimizer, range(8, 10))
        return bits(model)

    assert len(set(simulate(3, program).results)) == 1


@pytest.mark.parametrize("count", [8, 9])
def test_tensors_at_any_offset_are_compared(count):
    """Words of 8 bytes would begin at an odd value of 4."""
    values = torch.linspace(0, 1, count + 3)
    for a, b in ((0, 1), (1, 0), (1, 1), (0, 2)):
        first, second = values[a : a + count], values.clone()[b : b + count].copy_(values[a : a + count])
        assert are_equal(first, second)
        second[-1] += 1
        assert not are_equal(first, second)

    def program(comm):
        odd = net(dtype=torch.float32)
        odd.register_buffer("sigmas", torch.linspace(0, 1, 9)[1:])
        flat = torch.cat([torch.zeros(1), *(p.detach().flatten() for p in odd.parameters())])
        start = 1
        for p in odd.parameters():
            p.data, start = flat[start : start + p.numel()].view_as(p), start + p.numel()
        optimizer = local(odd, comm)
        for step in range(9):
            optimizer.zero_grad()
            loss_of(odd, batch(comm.rank, step, torch.float32)).backward()
            optimizer.step()
        optimizer.synchronize()
        return bits(odd)

    assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("root", [2, -1, 1.9, True, "0"])
def test_a_root_that_is_no_rank_is_refused(root):
    with pytest.raises(ValueError, match="root: expected a rank from 0 to 1"):
        simulate(2, lambda comm: broadcast(net(), comm, root))
