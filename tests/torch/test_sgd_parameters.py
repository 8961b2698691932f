"""SparseSGD: parameters that are frozen, unused, added, or of special kinds."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from nets import EXACT, batch, close, compared, net, parameters, residuals

from sparsecoll import LowBit, simulate
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, OneBitAdam, SparseSGD
from sparsecoll.torch.compressors import QSGD, ArrayCompressor


@pytest.mark.parametrize("settings", [{"momentum": 0.9, "weight_decay": 0.05}, {"weight_decay": 0.05}], ids=str)
def test_frozen_unused_unfrozen_and_added_parameters_are_as_in_torch(settings):
    """Layers frozen at the start, used in turns, unfrozen later, put into a group by hand and with add_param_group."""

    def run(make, ranks, comm):
        model, heads = net(), [torch.nn.Linear(64, 3).double() for _ in range(2)]
        late = [torch.nn.Linear(12, 12).double() for _ in range(2)]
        model[0].requires_grad_(False)
        optimizer = make([*model.parameters(), *heads[0].parameters(), *heads[1].parameters()], 0.2, **settings)
        seen = []
        for step in range(9):
            if step == 3:
                model[0].requires_grad_(True)
                optimizer.param_groups[0]["params"] += late[0].parameters()
            if step == 5:
                model[2].requires_grad_(False)
                optimizer.add_param_group({"params": late[1].parameters(), "lr": 0.1})
            optimizer.zero_grad()
            loss = 0
            for rank in ranks:
                x, y = batch(rank, step)
                for layer in late[: (step >= 3) + (step >= 5)]:
                    x = layer(x)
                head = heads[(step + rank) % 2] if step < 7 else heads[0]  # on some ranks only; at last on none
                loss = loss + torch.nn.functional.cross_entropy(head(model[:4](x)), y) / len(ranks)
            loss.backward()
            optimizer.step()
            seen.append(model[0].weight.detach().clone())
        return [*seen, *parameters(model), *(p.detach() for m in (*heads, *late) for p in m.parameters())]

    compared(run, algo="dense")


def test_what_waits_arrives_later_and_waits_while_its_parameter_is_frozen():
    def program(comm):
        a, b = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
        optimizer = SparseSGD([a, b], 1.0, comm=comm, algo="allgather", density=0.01)
        a.grad, b.grad = torch.linspace(1, 2, 50), torch.linspace(3, 4, 50)
        optimizer.step()
        before = b.detach().clone()
        b.requires_grad_(False)
        a.grad = b.grad = None
        optimizer.step()  # of a, which has no gradient, but something waits
        frozen = torch.equal(b, before) and int((residuals(optimizer)["1"] > 0).sum()) == 49
        b.requires_grad_(True)
        for _ in range(98):
            optimizer.step()
        return frozen, a.detach(), b.detach(), residuals(optimizer)

    for frozen, a, b, left in simulate(2, program).results:
        assert frozen and not any(t.any() for t in left.values())
        close([a, b], [-torch.linspace(1, 2, 50), -torch.linspace(3, 4, 50)], 1e-6, 1e-6)


def test_kinds_of_parameters():
    """Transposed, half, double, integer, empty, scalar and channels_last parameters, and a closure's mean loss."""

    def run(make, ranks, comm):
        offset = 0 if comm is None else comm.rank
        turned = torch.nn.Parameter(torch.arange(20.0).view(5, 4).t() + offset)
        half = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        double = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        whole = torch.nn.Parameter(torch.ones(3, dtype=torch.int8) + offset, requires_grad=False)
        empty = torch.nn.Parameter(torch.ones(0, 3))
        conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            conv.weight.copy_(torch.linspace(-1, 1, 108).view(4, 3, 3, 3) + offset)
            conv.bias.fill_(offset)
        optimizer = make([turned, half, double, whole, empty, *conv.parameters()], 0.5, momentum=0.5)
        image = torch.linspace(0, 1, 75).view(1, 3, 5, 5).to(memory_format=torch.channels_last)

        def closure():
            optimizer.zero_grad()
            loss = (turned**2).sum() / 40 + (half.float() ** 2).sum() + empty.sum()
            loss = loss + sum(rank * double**2 for rank in ranks) / len(ranks)
            loss = loss + sum(conv(image * (rank + 1)).square().mean() for rank in ranks) / len(ranks)
            loss.backward()
            return loss

        values = [optimizer.step(closure).detach().float() for _ in range(3)]
        return [p.detach() for p in (turned, half, double, whole, empty, *conv.parameters())] + values

    expected = run(torch.optim.SGD, range(2), None)
    for options in (*EXACT, {"algo": "allgather", "density": 1.0}):

        def program(comm, options=options):
            return run(lambda *a, **s: SparseSGD(*a, comm=comm, **options, **s), [comm.rank], comm)

        for result in simulate(2, program).results:
            assert [t.dtype for t in result] == [t.dtype for t in expected]
            close(result, expected, 1e-5, 1e-5)


def test_sparse_embedding_gradients():
    def run(make, ranks, comm):
        embedding = torch.nn.Embedding(10, 3, sparse=True)
        torch.nn.init.ones_(embedding.weight)
        optimizer = make(embedding.parameters(), 1.0)
        for _ in range(2):
            optimizer.zero_grad()
            (sum(embedding(torch.tensor([rank, rank, 5])).square().sum() for rank in ranks) / len(ranks)).backward()
            optimizer.step()
        return parameters(embedding)

    compared(run, P=2, algo="allgather", density=1.0)


@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("options", [{}, {"algo": "dense"}], ids=str)
def test_a_table_whose_first_gradient_has_no_rows(P, nesterov, options):
    def run(make, ranks, comm):
        table = torch.nn.Embedding(50, 4, sparse=True, padding_idx=0, dtype=torch.float64)
        torch.nn.init.ones_(table.weight)
        optimizer = make(table.parameters(), 0.1, 0.9, nesterov=nesterov)
        for indices in ([0, 0], [3], [0], [4, 3]):
            optimizer.zero_grad()
            table(torch.tensor(indices)).square().sum().backward()
            optimizer.step()
        return parameters(table)

    compared(run, P=P, **options)


@pytest.mark.parametrize("lr", [1.0, 1e-2])
def test_small_rows_are_rounded_in_units_of_the_gradient(lr):
    def program(comm):
        table = torch.nn.Embedding(10, 3, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = SparseSGD(table.parameters(), lr, comm=comm, algo="allgather", value_dtype="float16")
        (table(torch.tensor([4])).sum() * 1e-5).backward()
        optimizer.step()
        return table.weight.detach()[4] / -lr

    for moved in simulate(2, program).results:
        torch.testing.assert_close(moved, torch.full((3,), 1e-5), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_weight_decay_of_half_precision_is_not_rounded_away(settings):
    """A decay of less than a half unit in the last place counts, on average, as noise in the gradient lets it."""

    def run(make, ranks, comm):
        p, generator = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)), torch.Generator().manual_seed(0)
        optimizer = make([p], 0.1, weight_decay=1e-2, **settings)
        for _ in range(300):
            p.grad = (0.1 * torch.randn(1000, generator=generator)).bfloat16()
            optimizer.step()
        return p.detach().float().mean()

    expected = float(run(torch.optim.SGD, [0], None))

    def program(comm):
        return float(run(lambda *a, **s: SparseSGD(*a, comm=comm, algo="dense", **s), [0], comm))

    assert simulate(2, program).results == [pytest.approx(expected, abs=0.05)] * 2 and expected < 0.8


def test_sharded_parameters_are_refused():
    class DTensor(torch.Tensor):
        pass

    with pytest.raises(TypeError, match="rank 0: params: expected whole tensors on every rank, got a DTensor"):
        SparseSGD([torch.ones(3).as_subclass(DTensor).requires_grad_()])
    with pytest.raises(TypeError, match="expected tensors with values, got one on meta"):
        SparseSGD([torch.nn.Parameter(torch.empty(3, device="meta"))])
    with pytest.raises(TypeError, match=r"expected floating-point tensors, got torch\.complex64"):
        SparseSGD([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))])


@dataclass
class Signs(ArrayCompressor):
    """One scale for all values, and no code for zero."""

    name = "signs"

    def compress(self, acc):
        return [np.packbits(acc >= 0), np.abs(acc).mean(keepdims=True)]

    def decompress(self, arrays, n):
        signs, scale = arrays
        return np.where(np.unpackbits(signs, count=n), scale, -scale)


NOISY = {
    "efsignsgd": "efsignsgd",
    "2 bits": QSGD(2, feedback=True),
    "signs": Signs(),
    "SparseSGD": LowBit(bits=1, rounding="nearest"),
    "OneBitAdam": None,
    "OneBitAdam, 2 bits": None,
    "LocalOptimizer": QSGD(2, feedback=True),
}


@pytest.mark.parametrize("name", NOISY)
def test_a_parameter_without_gradients_stays_where_codes_have_no_zero(name):
    """It shares a scale with others, whose noise is not its own; what waits for it arrives when it is used again."""
    never = name == "OneBitAdam, 2 bits"  # not even in the warm-up

    def program(comm):
        used, nowhere = (torch.nn.Parameter(torch.ones(1100)) for _ in range(2))
        named = {"used": used, "nowhere": nowhere}
        inner = torch.optim.AdamW(named.values(), 0.1)
        if name == "SparseSGD":
            optimizer = SparseSGD(named.values(), 0.1, comm=comm, algo=NOISY[name])
        elif name.startswith("OneBitAdam"):
            optimizer = OneBitAdam(named.values(), 0.1, warm_up=2, every=1, bits=2 if never else 4, comm=comm)
        elif name == "LocalOptimizer":
            optimizer = LocalOptimizer(inner, named.items(), comm, compressor=NOISY[name], every=1)
        else:
            optimizer = DistributedOptimizer(inner, named.items(), comm, NOISY[name])
        values = []
        for step in range(5):
            optimizer.zero_grad()
            weight = torch.linspace(0.5 + comm.rank, 1, 1100)
            ((used * weight).sum() + ((nowhere * weight).sum() if step < 2 and not never else 0)).backward()
            optimizer.step()
            values.append(nowhere.detach().clone())
        return values, nowhere.grad, used.detach().clone()

    for values, gradient, used in simulate(2, program).results:
        assert gradient is None and all(torch.equal(later, values[1]) for later in values[2:])
        assert torch.equal(values[0], values[1]) == never and (used != 1).all()
