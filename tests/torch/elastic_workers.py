"""Program of test_elastic_workers.py: processes of an ElasticGroup are killed, stopped for a while, and replaced.

`python elastic_workers.py` forks a process that has the store, and WORKERS workers. What ENDS has for a round comes to
the first worker that is there. For each worker that is killed, a new one joins. Workers print what they do as JSON.
"""

import hashlib
import json
import os
import signal
import socket
import time

import torch
import torch.distributed as dist

from sparsecoll.torch import ElasticGroup, LocalOptimizer
from sparsecoll.torch.compressors import ChunkedTopK

WORKERS, ROUNDS, DEADLINE, SIZE = 4, 120, 0.8, 300
ENDS_WITHIN = 200  # seconds after which a process that has not ended counts as hanging
ENDS = {  # by round: where in it a worker is killed, or the round after which a worker goes on that is stopped
    8: "before it sends",
    16: "while it sends",
    24: "after it has sent",
    32: 32,
    40: 80,  # the messages of round 40 are no longer in the store then
    90: "after the round",
    100: "while it writes a state",
}


def report(**row):
    os.write(1, f"{json.dumps(row)}\n".encode())  # in one piece


class Counted(ChunkedTopK):
    """Has the sum of the values that it has sent last."""

    def compress(self, acc):
        values, source = acc
        before = (values if source is None else source).sum(dtype=float) + self._residual.current.sum(dtype=float)
        message = super().compress(acc)
        Group.sends = float(before - self._residual.trial.sum(dtype=float))
        return message


class Group(ElasticGroup):
    """Its workers tell what they do, and come to their ends."""

    def meets(self, number, *ends):
        """Whether this worker is the one to which one of these ends comes in a round."""
        if ENDS.get(number) not in ends:
            return False
        return self._store.compare_set(f"end/{number}", "", self.name).decode() == self.name

    def may_die(self, number, end):
        if self.meets(number, end):
            report(worker=self.name, killed=end, number=number)
            os.kill(os.getpid(), signal.SIGKILL)

    def exchange(self, number, weight, message, options):
        self.may_die(number, "before it sends")
        if self.meets(number, 32, 80):
            report(worker=self.name, stopped=os.getpid(), until=ENDS[number])
            os.kill(os.getpid(), signal.SIGSTOP)
        report(worker=self.name, number=number, sends=self.sends)
        started = time.monotonic()
        try:
            return super().exchange(number, weight, message, options)
        finally:
            report(worker=self.name, number=number, seconds=time.monotonic() - started)

    def _write(self, key, data):
        if key.startswith("state"):
            self.may_die(100 if int(key.split("/")[1]) > 100 else 0, "while it writes a state")
        elif not key.startswith("own"):
            self.may_die(int(key.partition("/")[0]), "while it sends")
        super()._write(key, data)

    def _is_complete(self, number, here):
        self.may_die(number, "after it has sent")
        return super()._is_complete(number, here)

    def publish(self, number, state, size):
        if number:
            report(worker=self.name, number=number - 1, contributors=self.contributors, **seen(state.__self__))
            self.may_die(number - 1, "after the round")
        super().publish(number, state, size)


def seen(engine):
    """The shared parameters, and what this worker has not yet contributed to them."""
    shared, own = engine._shared["p"], engine._own["p"]
    residual = engine._buckets.state_dict()["tensors"]["residual"]["p"]
    waiting = residual.double().sum() + (shared.double() - own.double()).sum()
    digest = hashlib.sha1(shared.numpy().tobytes()).hexdigest()
    return {"bits": digest, "shared": float(shared.double().sum()), "waiting": float(waiting), "made": made}


def made_with(group):
    p = torch.nn.Parameter(torch.zeros(SIZE))
    options = {"every": 2, "compressor": Counted(k=8, chunk=64), "outer_lr": 0.5, "dense_below": 0}
    return p, LocalOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], group, **options)


def work(store, name):
    """Train; the changes of a worker have a sum that is known (`made`)."""
    global made
    draw, made = torch.Generator().manual_seed(len(name)), 0.0
    group = Group(store, deadline=DEADLINE, workers=WORKERS if store.add("begun", 1) <= WORKERS else 1, name=name)
    p, optimizer = made_with(group)
    while optimizer._engine._next < ROUNDS:
        p.grad = torch.randn(SIZE, generator=draw)
        made += float(p.grad.double().sum())
        optimizer.step()
    optimizer.close()


def fork(function, *given):
    child = os.fork()
    if not child:
        status = 1
        try:
            function(*given)
            status = 0
        finally:
            os._exit(status)
    return child


def serve(port):
    parent = os.getppid()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while store is not None and os.getppid() == parent:
        time.sleep(0.1)


def main():
    torch.set_num_threads(1)
    made_with(ElasticGroup(dist.HashStore()))[1].synchronize()  # loads the kernels
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = fork(serve, port)

    def begin(number):
        return fork(lambda: work(dist.TCPStore("127.0.0.1", port, is_master=False), f"worker {number}"))

    store, begun = dist.TCPStore("127.0.0.1", port, is_master=False), time.monotonic()
    workers, count, stopped = {begin(i) for i in range(WORKERS)}, WORKERS, []
    while workers and time.monotonic() < begun + ENDS_WITHIN:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            stopped.append((pid, 80 if stopped else 32))
        elif pid:
            workers.discard(pid)
            report(ended=os.waitstatus_to_exitcode(status))
            if os.WIFSIGNALED(status):
                workers.add(begin(count))
                count += 1
        for i, (sleeper, number) in enumerate(stopped):
            if number and store.check([f"{number}/closed"]):
                os.kill(sleeper, signal.SIGCONT)
                stopped[i] = sleeper, 0
        time.sleep(0.01)
    for pid in [server, *workers]:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
