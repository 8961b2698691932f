"""The end of a process: no thread of the library runs while the interpreter is finalized, which may abort it."""

import pytest
from launching import python

pytest.importorskip("torch.distributed")

PROGRAM = """
import atexit, sys, threading
groups = []
atexit.register(lambda: print([t.name for t in threading.enumerate()], groups[0].broken))  # the last handler
import numpy as np, torch.distributed as dist, sparsecoll
from sparsecoll.transport import as_transport
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = sparsecoll.SparseVector([1], np.ones(1), 10)
sparsecoll.iallreduce(dist.group.WORLD, x).wait()
groups.append(as_transport(dist.group.WORLD))
if sys.argv[1] == "destroyed":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("group", "why"), [("destroyed", "its process group was destroyed"), ("left", "")])
def test_no_thread_is_left(group, why):
    done = python("-c", PROGRAM, group)
    assert (done.returncode, done.stdout) == (0, f"['MainThread'] {why}\n"), done.stderr
