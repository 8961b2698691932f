"""python torchft_replicas.py FOLDER: three replicas of examples/torchft_loop.py; one is killed, and starts again.

Then one trains alone. All and torchft's lighthouse are forked. What each prints is in FOLDER/BACKEND/NAME.
"""

import importlib.util
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch._dynamo  # noqa: F401 - which optimizers import
import torchft.coordination

import sparsecoll

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchft_loop.py"
SHOW = 5  # steps of a line
SECONDS = 60  # for each wait


def fork(path, function):
    """Call a function in a new process; return its number."""
    path.touch()
    if child := os.fork():
        return child
    for number, name in ((1, path), (2, f"{path}.log")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    try:
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def serve():
    times = {"join_timeout_ms": 1000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 1000}
    server = torchft.coordination.LighthouseServer("[::]:0", min_replicas=1, **times)
    print(server.address(), flush=True)
    time.sleep(10 * SECONDS)


def wait_for(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(condition)
        time.sleep(0.01)


def shown(path):
    """The number of lines, and how many replicas made the last step."""
    lines = path.read_text().splitlines()
    return len(lines), lines[-1].split()[-1] if lines else ""


def main(folder, backend):
    spec = importlib.util.spec_from_file_location("torchft_loop", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    running = {}

    def start(name, function):
        running[name] = fork(folder / name, function)

    def train(steps=10**6):
        example.train(backend, steps, SHOW)

    def end(*names):
        for name in names:
            os.kill(running[name], 9)
            os.waitpid(running.pop(name), 0)

    try:
        start("lighthouse", serve)
        wait_for(lambda: shown(folder / "lighthouse")[0])
        os.environ["TORCHFT_LIGHTHOUSE"] = (folder / "lighthouse").read_text().strip()
        for name in ("0", "1", "killed"):
            start(name, train)
        wait_for(lambda: shown(folder / "killed")[1] == "3")
        end("killed")
        before = shown(folder / "0")[0]
        wait_for(lambda: shown(folder / "0")[0] > before + 1)
        start("2", train)
        wait_for(lambda: shown(folder / "2")[1] == "3")
        end("0", "1", "2")
        steps = shown(folder / "0")[0] * SHOW
        time.sleep(3)  # until the lighthouse no longer counts those that were killed
        start("alone", lambda: train(steps))
        wait_for(lambda: shown(folder / "alone")[0] == steps // SHOW)
    finally:
        end(*list(running))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sparsecoll.allreduce(None, sparsecoll.RowSparse([1], np.ones((1, 2), np.float32), 3))  # loads the kernels
    for one in ("gloo", "sparsecoll"):
        Path(sys.argv[1], one).mkdir()
        main(Path(sys.argv[1], one), one)
