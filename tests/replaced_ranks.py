"""Program of test_replaced_ranks.py: ranks are killed, one after the other, and new processes take their places.

`python replaced_ranks.py P` starts P processes with a store in common. Whenever one of them is killed, the others
form a new group with a fresh process, which has never met any of them.
"""

import datetime
import json
import os
import signal
import socket
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsecoll
import sparsecoll.torch
from sparsecoll import SparseVector

LOSSES = 2  # the last rank is lost first, then the one before
STEPS = 3  # in each generation
ENDS_WITHIN = 200  # seconds after which a process that has not ended counts as hanging
TIMEOUT = datetime.timedelta(seconds=100)


def report(**row):
    line = json.dumps({"rank": RANK, "generation": generation, "pid": os.getpid(), **row})
    os.write(1, f"{line}\n".encode())  # in one piece


def form():
    """Form the group of this generation; as a user would, in a part of the store of its own."""
    own = dist.PrefixStore(f"generation {generation}", STORE)
    dist.init_process_group("gloo", store=own, rank=RANK, world_size=SIZE, timeout=TIMEOUT)


class Sums:
    """Calls on the default group."""

    def join(self):
        pass

    def step(self):
        x = SparseVector([RANK, 9], np.array([1.0, 2.0]), 10)
        return sparsecoll.iallreduce(None, x, "allgather").wait().to_dense().tolist()

    def kept(self):
        return ""


def model():
    torch.manual_seed(RANK if generation else 0)  # a fresh process begins with other parameters
    return torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 10))


def loss(net):
    return net(torch.randn(8, 40)).square().mean()


def digest(tensors):
    return [float(t.detach().double().sum()).hex() for t in tensors]


def momentum(optimizer):
    return [state["momentum_buffer"] for state in optimizer.state.values()]


def residuals(state):
    return digest(t for _, t in sorted(state["tensors"].get("residual", {}).items()))


class Optimizer:
    """DistributedOptimizer: a fresh process begins alone, then all move to the new group."""

    def __init__(self):
        self.model = model()
        inner = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        alone = sparsecoll.connect(dist.HashStore(), 0, 1)
        self.optimizer = sparsecoll.torch.DistributedOptimizer(
            inner, self.model.named_parameters(), alone, "topk", dense_below=0
        )

    def join(self):
        self.optimizer.move(None)

    def step(self):
        self.optimizer.zero_grad()
        loss(self.model).backward()
        self.optimizer.step()
        return digest([*self.model.parameters(), *momentum(self.optimizer)])

    def kept(self):
        return residuals(self.optimizer.state_dict()["sparsecoll"])


class Sgd(Optimizer):
    """The same with SparseSGD."""

    def __init__(self):
        self.model = model()
        alone = sparsecoll.connect(dist.HashStore(), 0, 1)
        self.optimizer = sparsecoll.torch.SparseSGD(
            self.model.named_parameters(), 0.05, momentum=0.9, comm=alone, density=0.1
        )


class Local(Optimizer):
    """The same with LocalOptimizer."""

    def __init__(self):
        self.model = model()
        inner = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        alone = sparsecoll.connect(dist.HashStore(), 0, 1)
        self.optimizer = sparsecoll.torch.LocalOptimizer(
            inner, self.model.named_parameters(), alone, "topk", every=1, dense_below=0
        )

    def step(self):
        super().step()
        return digest(self.model.parameters())  # momentum is each rank's own


def without_residuals(state):
    """A hook's state for a rank that has none."""
    tensors = {
        kind: of if kind in state["replicated"] else {name: torch.zeros_like(t) for name, t in of.items()}
        for kind, of in state["tensors"].items()
    }
    return {**state, "tensors": tensors}


class Hook:
    """DistributedDataParallel with the hook: all wrap their models anew, and load the state of the hook."""

    def __init__(self):
        self.model = model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.state = None

    def join(self):
        saved = self.state and self.state.state_dict()
        blank = [saved and without_residuals(saved)]
        dist.broadcast_object_list(blank, src=0)
        self.ddp = DistributedDataParallel(self.model)
        self.state = sparsecoll.torch.HookState(None, "topk", self.ddp)
        self.ddp.register_comm_hook(self.state, sparsecoll.torch.comm_hook)
        if blank[0]:
            self.state.load_state_dict(saved or {**blank[0], "rank": RANK})
        states = [self.optimizer.state_dict()]
        dist.broadcast_object_list(states, src=0)
        self.optimizer.load_state_dict(states[0])

    def step(self):
        self.optimizer.zero_grad()
        loss(self.ddp).backward()
        self.optimizer.step()
        return digest([*self.model.parameters(), *momentum(self.optimizer)])

    def kept(self):
        return self.state and residuals(self.state.state_dict())


def work():
    global generation
    each = {name: kind() for name, kind in KINDS.items()}
    torch.manual_seed(100 * generation + RANK)  # each rank has data of its own
    while True:
        before = {name: one.kept() for name, one in each.items()}
        form()
        for one in each.values():
            one.join()
        report(before=before, after={name: one.kept() for name, one in each.items()})
        for _ in range(STEPS):
            report(seen={name: one.step() for name, one in each.items()})
        if generation == LOSSES:
            break
        if max(1, SIZE - 1 - generation) == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                list(each.values())[-generation].step()  # the last one first
        except RuntimeError as error:  # gloo's, or CommunicationError
            report(error=str(error))
        dist.destroy_process_group()
        generation += 1
    dist.destroy_process_group()


def start(rank, generation):
    """Fork a rank; its number in the child, None in the parent."""
    child = os.fork()
    if child:
        processes[child] = rank
        return None
    return rank, generation


def serve(port):
    """Fork a process that has the store."""
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while store is not None and os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


KINDS = {"sums": Sums, "optimizer": Optimizer, "sgd": Sgd, "local": Local, "hook": Hook}

if __name__ == "__main__":
    torch.set_num_threads(1)
    SIZE = int(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server, processes, lost, begun = serve(port), {}, 0, time.monotonic()
    role = next(filter(None, (start(rank, 0) for rank in range(SIZE))), None)
    while role is None and processes and time.monotonic() < begun + ENDS_WITHIN:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank, code = processes.pop(pid), os.waitstatus_to_exitcode(status)
            print(json.dumps({"rank": rank, "ended": code}), flush=True)
            if code == -signal.SIGKILL:
                lost += 1
                role = start(rank, lost)
        time.sleep(0.02)
    if role is not None:
        RANK, generation = role
        STORE = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        work()
    else:
        for pid in [server, *processes]:
            os.kill(pid, signal.SIGKILL)
