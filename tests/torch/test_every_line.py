"""An exception at any line of a collective method on one rank is raised on all of them, and nothing is half done.

SPARSECOLL_FUZZ=1 injects one at every line (`make fuzz`); otherwise at some of them, spread evenly.
"""

import contextlib
import os
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from lines import Lines, spread  # noqa: E402
from nets import batch, bits, loss_of, net  # noqa: E402

from sparsecoll import CommunicationError, simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, SparseSGD  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402
from sparsecoll.torch.optimizers import sgd, sgd_rules  # noqa: E402
from sparsecoll.torch.reduction import (  # noqa: E402
    accumulator,
    bucket,
    buckets,
    engine,
    hooks,
    reducer,
    window,
)

P, CULPRIT, STEP = 3, 1, 2
TRIED = None if os.environ.get("SPARSECOLL_FUZZ") else 12  # lines of a kind
TEXT = f"rank {CULPRIT} failed: Injected: here"
OPTIONS = {"bucket_bytes": 6000, "dense_below": 10}
FILES = [module.__file__ for module in (accumulator, bucket, buckets, engine, hooks, reducer, sgd, sgd_rules, window)]
ADAPTER = {
    "Engine.synchronize", "Engine.ensure_means", "Engine.before_step", "Engine.after_step", "Engine.accumulated",
    "synchronize_all.<locals>.agree", "Hooks.attach",
    "Reducer.reduce", "Reducer._attempt", "Reducer._wait", "Reducer._wait.<locals>.agree", "Reducer._accept",
    "Reducer._assign", "Reducer._open", "Reducer._rollback", "Reducer.send", "Reducer.make_buckets", "Reducer.commit",
    "Reducer._copy", "Reducer._isend", "Reducer._send_rest", "Reducer._job", "Reducer._failed",
    "Buckets.accept", "Buckets.commit", "Bucket.take_grad", "Bucket.new_grads", "Bucket.assign_grads", "Bucket.accept",
    "Bucket.reduce", "Bucket.mean_buffer",
    "SparseSGD.step", "SparseSGD._reduced", "SparseSGD._round", "SparseSGD._update", "take_step",
    "Accumulator.sums", "Accumulator._accumulate", "Accumulator.commit", "Accumulator.fits", "Bucket.accumulate",
    "Window.begin_step", "Window._start", "Means.mean", "Means.turn", "Means._begin", "Means._form", "Means._reduce",
    "Means._reduce.<locals>.reduce", "Means._take", "Means._apply", "Means._move", "Bucket.take_changes",
}  # fmt: skip


def of_adapter(code):
    return code.co_filename in FILES and code.co_qualname in ADAPTER


def sgd_of(model):
    return torch.optim.SGD(model.parameters(), 0.1)


EXACT = TopKCompressor(0.1, algo="allgather")
KINDS = {
    "overlap": lambda comm, model: DistributedOptimizer(sgd_of(model), model, comm, EXACT, **OPTIONS),
    "no overlap": lambda comm, model: DistributedOptimizer(sgd_of(model), model, comm, EXACT, overlap=False, **OPTIONS),
    "sparse": lambda comm, model: SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, algo="allgather", density=0.1),
    "local": lambda comm, model: LocalOptimizer(sgd_of(model), model, comm, EXACT, every=1, **OPTIONS),
}


def training(kind, target, comm):
    """Train on one rank, and go on after an exception, if one is raised.

    Returns:
        (lines that were seen, (what was raised, in which step), gradients then or after that step, bits at the end)
    """
    model = net()
    optimizer = KINDS[kind](comm, model)
    raised, step, grads, lines = None, 0, [], Lines(of_adapter, target)
    while step < STEP + 3:
        optimizer.zero_grad()
        try:
            with lines if step == STEP and comm.rank == CULPRIT and not raised else contextlib.nullcontext():
                loss_of(model, batch(comm.rank, step)).backward()
                optimizer.step()
            if step == STEP and not grads:
                grads = [p.grad.clone() for p in model.parameters()]
        except CommunicationError as error:
            assert not raised, error
            raised, grads = (str(error), step), [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            if max(comm.allgather(step)) > STEP:  # the others have taken the step that the culprit has not
                optimizer.move(comm)
                step = STEP
            elif kind == "local":  # some buckets have moved, perhaps not on all ranks
                optimizer.discard()
            else:
                continue
        step += 1
    return list(lines.seen), raised, grads, bits(model)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_any_line_is_raised_on_all_ranks(kind):
    whole = simulate(P, partial(training, kind, None)).results
    lines = whole[CULPRIT][0]
    tried = spread(lines, TRIED)
    assert len(tried) > 10
    problems = []
    for target in tried:
        try:
            results = simulate(P, partial(training, kind, target)).results
        except Exception as error:
            problems.append((target, repr(error)))
            continue
        _, raised, grads, final = zip(*results, strict=True)
        if {text for text, _ in filter(None, raised)} != {TEXT} or None in raised:
            problems.append((target, raised))
            continue
        steps = [step for _, step in raised]
        late = [step for rank, step in enumerate(steps) if rank != CULPRIT]
        if steps[CULPRIT] != STEP or len(set(late)) != 1 or late[0] - STEP not in (0, 1) or len(set(final)) != 1:
            problems.append((target, raised, len(set(final))))
        elif late[0] == STEP and kind != "local" and final[0] != whole[0][3]:
            problems.append((target, "another result"))
        elif kind.endswith("overlap") and late[0] > STEP:
            means = [torch.equal(a, b) for a, b in zip(grads[CULPRIT], whole[CULPRIT][2], strict=True) if a is not None]
            if not all(means) and any(means):
                problems.append((target, "half of the gradients are means", means))
    assert not problems, "\n".join(map(str, problems))
