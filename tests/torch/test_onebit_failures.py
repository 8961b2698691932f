"""OneBitAdam: an exception at any line on one rank is raised on all ranks, which go on with the same bits."""

import contextlib
import os
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from lines import Injected, Lines, spread  # noqa: E402
from nets import batch, bits, loss_of, net  # noqa: E402
from test_onebit import WARM_UP, go_on, one_bit  # noqa: E402

from sparsecoll import CommunicationError, simulate  # noqa: E402
from sparsecoll.torch import OneBitAdam  # noqa: E402
from sparsecoll.torch.compressors import onebit as compressor  # noqa: E402
from sparsecoll.torch.optimizers import onebit as optimizers  # noqa: E402

TRIED = None if os.environ.get("SPARSECOLL_FUZZ") else 20  # lines at which an exception is injected
FILES = (compressor.__file__, optimizers.__file__)


def of_one_bit(code):
    return code.co_filename in FILES and code.co_qualname != "OneBitAdam.step"  # which calls that of the stage


def run(comm, step, target):
    """Steps, one of which fails on rank 1 at a line; the lines of that step, and bits at the end."""
    model = net()
    optimizer, lines = one_bit(comm, model), Lines(of_one_bit, target)
    go_on(comm, model, optimizer, 0, step)
    failed = 0
    for number in range(step, step + 8):
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, number)).backward()
        try:
            with lines if (comm.rank, number) == (1, step) else contextlib.nullcontext():
                optimizer.step()
        except (Injected, CommunicationError) as error:
            assert "here" in str(error), error
            failed += 1
            optimizer.discard()
    assert failed == (target is not None)
    return list(lines.seen), bits(model), optimizer.warming_up


@pytest.mark.parametrize("step", [WARM_UP - 1, WARM_UP, 2 * WARM_UP], ids=["end of the warm-up", "first", "moments"])
def test_an_exception_at_any_line_is_raised_on_all_ranks(step):
    lines = simulate(2, partial(run, step=step, target=None)).results[1][0]
    assert len(lines) > 20
    for target in spread(lines, TRIED):
        (_, first, warming_up), (_, second, _) = simulate(2, partial(run, step=step, target=target)).results
        assert first == second and not warming_up, target


def test_amsgrad_is_refused():
    def program(comm):
        OneBitAdam([{"params": [torch.nn.Parameter(torch.ones(3))], "amsgrad": True}], comm=comm, warm_up=4)

    with pytest.raises(ValueError, match="amsgrad: expected False in all groups, got True"):
        simulate(2, program)


def test_a_parameter_that_leaves_the_groups_during_the_warm_up():
    """It still requires gradients, as one that another optimizer steps."""

    def program(comm):
        model = net()
        optimizer = one_bit(comm, model)
        go_on(comm, model, optimizer, 0, 2)
        gone = optimizer.param_groups[0]["params"].pop()
        go_on(comm, model, optimizer, 2, WARM_UP + 2)
        before = gone.detach().clone()
        go_on(comm, model, optimizer, WARM_UP + 2, WARM_UP + 4)
        assert not optimizer.warming_up and torch.equal(gone, before)
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1
