"""Programs of test_exits.py: the last rank ends in the middle of something, and the others tell what they see.

`python exit_programs.py mpi CASE` is what mpirun starts. `python exit_programs.py P CASE ...` starts P processes for
each case, as torchrun does but without ending the others when one fails, and prints a line of JSON for each.
"""

import atexit
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

ENDED = os.environ.get("ENDED")  # the folder in which a rank whose program has ended leaves a file


@atexit.register
def _end():  # the last handler, since it is the first one that is registered
    if ENDED:
        Path(ENDED, str(os.getpid())).touch()


import exit_frees as frees  # noqa: E402
import numpy as np  # noqa: E402

import sparsecoll  # noqa: E402
from sparsecoll import SparseVector  # noqa: E402
from sparsecoll.transport import process  # noqa: E402


def begin(network):
    """Find the communicator, and this process's place in it."""
    global COMM, RANK, LAST
    process.LAST_SECONDS, process.FAILED_SECONDS = 1.0, 0.3
    if network == "mpi":
        from mpi4py import MPI

        COMM = MPI.COMM_WORLD
        RANK, LAST = COMM.rank, COMM.size - 1
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        COMM, RANK, LAST = None, dist.get_rank(), dist.get_world_size() - 1


def say(text):
    os.write(1, f"{text}\n".encode())  # in one piece


def vector():
    return SparseVector([RANK, 9], np.array([1.0, 2.0]), 10)


def call(comm=None, **options):
    return sparsecoll.allreduce(comm or COMM, vector(), "allgather", **options)


def start(comm=None):
    return sparsecoll.iallreduce(comm or COMM, vector(), "allgather")


def tell(function):
    """Print what a call of a rank that goes on returns or raises."""
    try:
        function()
    except sparsecoll.CommunicationError as error:
        say(f"<rank {RANK}: {error}>")
        sys.exit(5)
    say(f"<rank {RANK}: done>")


def forever():
    """Make calls until one fails."""
    while True:
        call()


def absent():
    """Let the other ranks make no call until the last one has left the library's handler of atexit."""
    if RANK != LAST:
        while not os.listdir(ENDED):
            time.sleep(0.05)


def others(function):
    """Let the other ranks make calls; the last one goes on with the program."""
    call()
    if RANK != LAST:
        tell(function)
        sys.exit(5)


# -- nonblocking calls that nobody waits for


def outstanding(end):
    """The others make no matching call."""
    call()
    if RANK != LAST:
        absent()
        tell(forever)
    request = start()
    more = start()
    end()
    del request, more


def matched():
    """The others make the matching call: all end well."""
    call()
    if RANK == LAST:
        start()
    else:
        time.sleep(0.3)
        tell(call)


def plan():
    plan = sparsecoll.allreduce_init(COMM, vector(), "allgather")
    if RANK == LAST:
        plan.start(vector())
        raise ValueError("a bug")
    absent()
    tell(forever)


def raises(_=None):
    raise ValueError("a bug")


def finalized(pending):
    """The last rank ends its use of MPI while the others go on; or all do with calls under way, which end first."""
    from mpi4py import MPI

    call() if pending else others(forever)
    requests = [start() for _ in range(20 * pending)]
    MPI.Finalize()
    for request in requests:
        request.wait()


def early():
    """The last rank returns from its program before the others."""
    others(forever)


# -- training


def model():
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))


def train(wrapped, optimizer, fail):
    import torch

    for step in range(10):
        out = wrapped(torch.ones(4, 64) * (RANK + 1)).square().mean()
        if step == 3 and RANK == LAST:
            fail(wrapped)
        out.backward()
        optimizer.step()
        optimizer.zero_grad()


def in_loss(_):
    raise ValueError("a bug")


def in_hook(wrapped):
    list(wrapped.parameters())[4].register_hook(in_loss)


def ddp(fail):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import sparsecoll.torch

    if COMM is not None:
        sparsecoll.torch.init_process_group(COMM)
    net = DistributedDataParallel(model(), bucket_cap_mb=0.02)
    net.register_comm_hook(sparsecoll.torch.HookState(COMM, "topk", net), sparsecoll.torch.comm_hook)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    training(lambda: train(net, optimizer, fail))


def distributed(fail):
    import torch

    import sparsecoll.torch

    net = model()
    optimizer = sparsecoll.torch.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.01), net.named_parameters(), COMM, "topk", bucket_bytes=20_000
    )
    training(lambda: train(net, optimizer, fail))


def training(run):
    if RANK == LAST:
        return run()
    try:
        run()
    except (sparsecoll.CommunicationError, RuntimeError) as error:
        say(f"<rank {RANK}: {error}>")
        sys.exit(5)
    say(f"<rank {RANK}: done>")


# -- finalizers


class Closes:
    """Makes a call when it is deleted."""

    def __init__(self, function):
        self.function = function

    def __del__(self):
        self.function()


def finalizers(matching):
    """A finalizer, an attribute of a module and a handler of atexit make a call each, on all ranks or on one."""
    import weakref

    global KEPT

    def one():
        try:
            call()
        except sparsecoll.CommunicationError as error:
            say(f"<rank {RANK}: {error}>")
        else:
            say(f"<rank {RANK}: done>")

    call()
    start()
    if RANK == LAST or matching:
        atexit.register(one)
        KEPT = type("Kept", (), {})()
        weakref.finalize(KEPT, one)
        if not matching:
            KEPT.closes = Closes(one)


# -- threads


def thread(daemon, end):
    """The last rank's main thread ends while another one is in a call."""
    call()
    if RANK != LAST:
        absent() if daemon or end == "raise" else time.sleep(1)
        tell(forever)
    threading.Thread(target=lambda: [call() for _ in range(2)], daemon=daemon).start()
    time.sleep(0.5)
    if end == "raise":
        raise ValueError("a bug")


def works_on():
    """A thread goes on with the program after the main thread has ended: all ends well."""

    def work():
        time.sleep(1)
        for _ in range(20):
            start().wait()
            call()
        say(f"<rank {RANK}: done>")

    call()
    threading.Thread(target=work).start()


# -- torch with gloo, MPI and sparsecoll in one process


def together(order, destroy):
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    for name in order:
        if name == "g" and not dist.is_initialized():
            import sparsecoll.torch

            sparsecoll.torch.init_process_group(MPI.COMM_WORLD)
            dist.all_reduce(torch.ones(1000))
        if name == "m":
            MPI.COMM_WORLD.allreduce(1)
            start(MPI.COMM_WORLD).wait()
        if name == "s" and dist.is_initialized():
            group = dist.new_group(list(range(LAST + 1)))
            start(group).wait()
            work = dist.all_reduce(torch.ones(1000), async_op=True)
            start(group).wait()
            work.wait()
    say(f"<rank {RANK}: done>")
    if destroy == "outstanding":
        start(MPI.COMM_WORLD)
    elif destroy == "destroy":
        dist.destroy_process_group()
        start(MPI.COMM_WORLD).wait()
    elif destroy == "finalize":
        MPI.Finalize()
        dist.destroy_process_group()
    elif destroy == "finalize only":
        MPI.Finalize()


# -- forked processes


def forked():
    """A forked process, and workers of a DataLoader, are alive when the rank ends."""
    import torch

    call()
    loader = iter(
        torch.utils.data.DataLoader(list(range(1000)), num_workers=2, multiprocessing_context="fork", batch_size=2)
    )
    next(loader)
    globals()["LOADER"] = loader
    start().wait()
    start()
    say(f"<rank {RANK}: done>")


# -- Ctrl-C


def interrupted():
    call()
    if RANK != LAST:
        absent()
        tell(forever)
    start()
    start()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    time.sleep(30)


CASES = {
    "outstanding, ends": lambda: outstanding(lambda: None),
    "outstanding, raises": lambda: outstanding(raises),
    "outstanding, exits": lambda: outstanding(lambda: sys.exit(3)),
    "matched": matched,
    "plan": plan,
    "plainly": lambda: raises(others(forever)),
    "early": early,
    **frees.cases(sys.modules[__name__]),
    "finalized": lambda: finalized(False),
    "pending, finalized": lambda: finalized(True),
    "ddp, loss": lambda: ddp(in_loss),
    "ddp, hook": lambda: ddp(in_hook),
    "optimizer, loss": lambda: distributed(in_loss),
    "optimizer, hook": lambda: distributed(in_hook),
    "finalizers, all": lambda: finalizers(True),
    "finalizers, one": lambda: finalizers(False),
    "daemon": lambda: thread(True, "return"),
    "daemon, raises": lambda: thread(True, "raise"),
    "thread": lambda: thread(False, "return"),
    "thread, raises": lambda: thread(False, "raise"),
    "works on": works_on,
    "forked": forked,
    "interrupted": interrupted,
    **{
        f"together, {order}, {destroy}": lambda order=order, destroy=destroy: together(order, destroy)
        for order in ("gms", "mgs", "gsm")
        for destroy in ("left", "outstanding", "destroy", "finalize", "finalize only")
    },
}


if __name__ == "__main__":
    network, running, *_ = sys.argv[1:]
    if network != "mpi":
        import torch
        import torch.distributed
        from launched_ranks import launched

        import sparsecoll.torch

        torch.set_num_threads(1)
        folder = tempfile.mkdtemp()
        for running in sys.argv[2:]:
            if ENDED := launched(running, int(network), folder):
                break
        else:
            sys.exit()
    begin(network)
    CASES[running]()
