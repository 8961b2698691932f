"""add_param_group on all ranks or on none: what another rank raises in it takes back the group that this rank added.

SPARSECOLL_FUZZ=1 injects an exception at every line (`make fuzz`); otherwise at some of them, spread evenly.
"""

import contextlib
import os
import re
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lines import Injected, Lines, spread  # noqa: E402
from nets import batch, bits, loss_of, net  # noqa: E402

import sparsecoll.torch  # noqa: E402
from sparsecoll import CommunicationError, simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, OneBitAdam, SparseSGD  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402

P, CULPRIT = 3, 1
TRIED = None if os.environ.get("SPARSECOLL_FUZZ") else 20  # lines of a case
HOME = Path(sparsecoll.torch.__file__).parent
OPTIONS = {"bucket_bytes": 6000, "dense_below": 10}
FIRST = 0.1


def sgd(params):
    return torch.optim.SGD(params, FIRST)


def topk():
    return TopKCompressor(0.1, algo="allgather")


WAYS = {
    "DistributedOptimizer": lambda comm, params, model: DistributedOptimizer(
        sgd(params), model, comm, topk(), **OPTIONS
    ),
    "LocalOptimizer": lambda comm, params, model: LocalOptimizer(sgd(params), model, comm, topk(), every=1, **OPTIONS),
    "SparseSGD": lambda comm, params, model: SparseSGD(
        params, FIRST, 0.9, comm=comm, model=model, algo="allgather", density=0.1
    ),
}
HOWS = ("late", "replaced")
LATE = ("take_over", "Engine.close")


def wanted(code):
    """The adapter's own code, without what reports exceptions, and what follows once all ranks have succeeded."""
    path = Path(code.co_filename)
    return (
        HOME in path.parents
        and (path.name != "calls.py" or code.co_qualname.startswith("Row."))
        and code.co_qualname not in LATE
    )


def source(name):
    return (HOME / name).read_text().splitlines()


def step(comm, model, optimizer, number):
    optimizer.zero_grad()
    loss_of(model, batch(comm.rank, number)).backward()
    optimizer.step()


def remove(optimizer, params):
    inner, ids = getattr(optimizer, "optimizer", optimizer), set(map(id, params))
    for group in inner.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in ids]
    for p in params:
        inner.state.pop(p, None)


def known(optimizer):
    """Names and shapes of the parameters that are reduced, and how many are in which group."""
    replica = optimizer._engine.replica if hasattr(optimizer, "_engine") else optimizer._replica
    shapes = {name: tuple(p.shape) for name, p in replica.params.items()}
    return shapes, [len(g["params"]) for g in optimizer.param_groups]


def training(way, how, given, comm):
    """Add a group between steps, again if that fails; return (what failed, lines, whether all was as before, bits)."""
    model = net()
    stays = [p for name, p in model.named_parameters() if how == "replaced" or name[0] != "4"]
    optimizer = WAYS[way](comm, stays, model)
    for number in range(2):
        step(comm, model, optimizer, number)
    if how == "replaced":
        remove(optimizer, list(model[4].parameters()))
        torch.manual_seed(7)
        model[4] = torch.nn.Linear(64, 3).double()
    before, raised, same = known(optimizer), None, True
    group = {"params": list(model[4].parameters()), "lr": 0.05}
    watch = Lines(wanted, given) if comm.rank == CULPRIT and not callable(given) else contextlib.nullcontext()
    try:
        with watch:
            optimizer.add_param_group(given(comm, dict(group)) if callable(given) else group)
    except (CommunicationError, ValueError, TypeError, Injected) as error:
        raised, same = str(error), known(optimizer) == before
        optimizer.add_param_group({"params": group["params"], "lr": 0.05})
    for number in range(2, 5):
        step(comm, model, optimizer, number)
    return raised, list(getattr(watch, "seen", ())), same, bits(model)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_at_any_line_takes_the_group_back_on_all_ranks(way, how):
    whole = simulate(P, partial(training, way, how, None)).results
    ends = {"Engine.regroup": "engine", "Window.regroup": "window", "SparseSGD._introduce": "../optimizers/sgd"}
    last = {  # where all ranks have agreed
        f"{name} {i}"
        for name, file in ends.items()
        for i, text in enumerate(source(f"reduction/{file}.py"), 1)
        if "    take_over(" in text or "._flat.take_over(" in text
    }
    assert {line.split()[0] for line in last} == ends.keys()
    lines, problems = [line for line in whole[CULPRIT][1] if "{} {}".format(*line) not in last], []
    assert len(lines) > 20 and {raised for raised, *_ in whole} == {None}
    for target in spread(lines, TRIED):
        try:
            raised, _, same, final = zip(*simulate(P, partial(training, way, how, target)).results, strict=True)
        except Exception as error:
            problems.append((target, repr(error)))
            continue
        if set(raised) != {f"rank {CULPRIT} failed: Injected: here"} or not all(same):
            problems.append((target, raised, same))
        elif set(final) != {whole[0][3]}:
            problems.append((target, "another result", len(set(final))))
    assert not problems, "\n".join(map(str, problems))


def no_leaf(group):
    return {**group, "params": [p * 2 for p in group["params"]]}


def shorter(group):
    return {**group, "params": group["params"][:1]}


def integers(group):
    return {**group, "params": [torch.zeros(3, dtype=torch.int64)]}


def no_group(group):
    return {"lr": 0.1}


BAD = {
    "no leaf": (no_leaf, "non-leaf"),
    "shorter": (shorter, "parameters|parameter"),
    "integers": (integers, "parameters|int64|floating"),
    "no group": (no_group, "params"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("way", WAYS)
def test_a_group_that_is_wrong_on_one_rank_is_on_none(way, case):
    spoil, text = BAD[case]

    def given(comm, group):
        return spoil(group) if comm.rank == CULPRIT else group

    whole = simulate(P, partial(training, way, "late", None)).results
    raised, _, same, final = zip(*simulate(P, partial(training, way, "late", given)).results, strict=True)
    assert None not in raised and all(same) and all(re.search(text, one) for one in raised), (raised, same)
    assert set(final) == {whole[0][3]}


@pytest.mark.parametrize("inner", [False, True])
def test_a_group_that_is_added_after_the_reduction_takes_part_in_the_next_step(inner):
    """Its gradients are each rank's own until then."""

    def program(comm):
        torch.manual_seed(0)
        body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        sgd = torch.optim.SGD(body.parameters(), 0.1)
        optimizer = DistributedOptimizer(sgd, body, comm, "none")
        x, seen = torch.randn(4, 8, generator=torch.Generator().manual_seed(comm.rank)), []
        for step in range(3):
            optimizer.zero_grad()
            head.zero_grad()
            head(body(x)).square().mean().backward()
            if step == 0:
                (sgd if inner else optimizer).add_param_group({"params": list(head.parameters())})
            optimizer.step()
            seen.append([p.tolist() for p in (body.weight, head.weight)])
        return seen

    first, second = simulate(2, program).results
    assert first == second and first[0][1] != first[2][1]


def test_amsgrad_is_refused_in_later_groups_of_one_bit_adam_too():
    model, head = net(), torch.nn.Linear(3, 2)
    optimizer = OneBitAdam(model.parameters(), 0.1, warm_up=3)
    with pytest.raises(ValueError, match="amsgrad: expected False"):
        optimizer.add_param_group({"params": list(head.parameters()), "amsgrad": True})
    assert len(optimizer.param_groups) == 1


def test_the_cure_of_gradients_that_were_changed_in_place_is_one():
    """The error names zero_grad()."""

    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, "none")
        loss_of(model, batch(comm.rank, 0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with optimizer.no_sync():
            loss_of(model, batch(comm.rank, 1)).backward()
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, 2)).backward()
        optimizer.step()
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1
