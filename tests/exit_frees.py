"""Programs of exit_programs.py that send long messages, or free a communicator; `main` is that module."""

import os
import signal
import sys
import threading
import time

import numpy as np

import sparsecoll
from sparsecoll import SparseVector


def interrupt():
    """Interrupt the call that follows."""
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def gathered(main, end):
    """The others send to the last one more than MPI sends ahead; from the second call on, nothing else is sent."""
    x = SparseVector(np.arange(300_000), np.ones(300_000), 600_000)
    sparsecoll.gather(main.COMM, x, root=main.LAST)
    if main.RANK != main.LAST:
        main.tell(lambda: sparsecoll.gather(main.COMM, x, root=main.LAST))
        sys.exit(5)
    end()


def freed(main, end):
    """An exception leaves the block that frees the communicator, on the last rank only."""
    own = main.COMM.Dup()
    try:
        for step in range(10):
            if main.RANK != main.LAST:
                time.sleep(0.05 * main.RANK + 0.5 * (step == 3))
            if step == 3 and main.RANK == main.LAST:
                end()
            main.call(own)
        main.say(f"<rank {main.RANK}: done>")
    except sparsecoll.CommunicationError as error:
        main.say(f"<rank {main.RANK}: {error}>")
        sys.exit(5)
    finally:
        own.Free()


def left(main):
    """Ranks leave by SystemExit once they have sent what the last one gathers; one of them is late."""
    own, x = main.COMM.Dup(), main.vector()
    try:
        sparsecoll.gather(own, x, root=main.LAST)
        if main.RANK == 0:
            time.sleep(2)
        sparsecoll.gather(own, x, root=main.LAST)
        if main.RANK != main.LAST:
            main.say(f"<rank {main.RANK}: done>")
        sys.exit(0)
    finally:
        own.Free()


def cases(main):
    """The programs by name."""
    return {
        "gathered": lambda: gathered(main, main.raises),
        "gathered, ends": lambda: gathered(main, lambda: None),
        "freed": lambda: freed(main, main.raises),
        "freed, interrupted": lambda: freed(main, interrupt),
        "freed, exits": lambda: left(main),
        "freed, exits early": lambda: freed(main, sys.exit),
    }
