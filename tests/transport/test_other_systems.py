"""What only Linux has (/proc, /sys, abstract sockets, TCP_INFO, affinity) is not needed to connect ranks and to sum."""

import subprocess
import sys
from pathlib import Path

import pytest

from sparsecoll.transport.tcp import addresses

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import os, pathlib, socket, sys
from concurrent.futures import ThreadPoolExecutor
import numba, numpy as np

sys.platform = "darwin"
for module, names in (
    (socket, "TCP_INFO TCP_KEEPIDLE TCP_KEEPINTVL TCP_KEEPCNT TCP_USER_TIMEOUT"),
    (os, "sched_getaffinity sched_setaffinity"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("open", "read_text", "write_text"):
    def missing(self, *arguments, real=getattr(pathlib.Path, name), **options):
        if str(self).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return real(self, *arguments, **options)
    setattr(pathlib.Path, name, missing)
real_bind = socket.socket.bind
def bind(self, address):
    assert self.family != socket.AF_UNIX, "abstract sockets are Linux's"
    return real_bind(self, address)
socket.socket.bind = bind

sys.path.insert(0, "tests")
import socket_ranks
import sparsecoll
from sparsecoll.bench import timing
from sparsecoll.cli import doctor
from sparsecoll.kernels import threads
from sparsecoll.transport import LocalTransport

def program(transport):
    x = sparsecoll.SparseVector([transport.rank, 9], np.array([1.0, 2.0]), 10)
    total = sparsecoll.allreduce(transport, x)
    for connection in transport._outgoing:
        assert connection.peer == transport.rank or connection.socket.family == socket.AF_INET
        connection.check_host()
    return total.to_dense().tolist()

sums = socket_ranks.run(3, program, timeout=60)
assert sums == [[1, 1, 1, 0, 0, 0, 0, 0, 0, 6]] * 3, sums
assert threads.cores() >= 1
own = LocalTransport()
row = timing.measure(own, timing.Call("dense", 1.0), lambda: np.ones(10), repeat=1)
assert row["n"] == 10, row
print(timing._memory("VmRSS"), timing.about()["machine"])
print(*(finding.subject for finding in doctor.examine(None)))
"""


def test_ranks_sum_without_what_only_linux_has():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 ")  # bytes of memory, which the system does not report


@pytest.mark.parametrize(("platform", "number"), [("linux", 0x8915), ("darwin", 0xC0206921)])
def test_the_address_of_an_interface_is_asked_for_as_the_system_wants_it(monkeypatch, platform, number):
    fcntl = pytest.importorskip("fcntl")
    asked = []

    def ioctl(probe, request, argument):
        asked.append((request, argument[:4]))
        return argument[:16] + b"\x10\x02\x00\x00" + bytes([10, 0, 0, 7]) + argument[24:]

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(addresses.sys, "platform", platform)
    assert addresses.interface_address("GLOO_SOCKET_IFNAME", "en0") == "10.0.0.7"
    assert asked == [(number, b"en0\0")]
