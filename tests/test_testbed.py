"""The testbed: a call's bytes cross the links, as counted; it cleans up; without what it needs it says so."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "perf"))

import testbed

from sparsecoll.kernels.threads import cores

PROGRAM = """
import json, sys
import numpy as np
import sparsecoll
from mpi4py import MPI
comm = MPI.COMM_WORLD
gradient = np.random.default_rng(comm.rank).standard_normal(1_000_000).astype(np.float32)
for algo in ("allgather", "oktopk", "dense"):
    sparsecoll.allreduce(comm, gradient, algo, density=None if algo == "dense" else 0.05)
traffic = sparsecoll.traffic(comm)
rows = comm.gather((traffic.total.bytes_sent, traffic.total.bytes_received))
if comm.rank == 0:
    open(sys.argv[1], "w").write(json.dumps(rows))
"""


@pytest.fixture
def hosts():
    lacking = testbed.missing()
    mpirun = Path(sys.executable).parent / "mpirun"
    if lacking or not (mpirun.exists() or shutil.which("mpirun")):
        pytest.skip(f"needs {lacking or 'mpirun'}")
    if testbed.hosts_up():
        pytest.skip("a testbed is up")
    with testbed.Testbed(3, "1gbit") as bed:
        yield bed
    assert testbed.hosts_up() == []
    assert testbed.BRIDGE not in subprocess.check_output(["ip", "link", "show"], text=True)


@pytest.mark.slow
def test_bytes_on_the_links_are_the_bytes_counted(hosts, tmp_path):
    out = tmp_path / "counted.json"
    before = testbed.link_bytes()
    try:
        done = testbed.run([sys.executable, "-c", PROGRAM, str(out)], timeout=120, capture=True)
    except testbed.TestbedError as error:  # another MPI's mpirun
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    counted = json.loads(out.read_text())
    after = testbed.link_bytes()
    assert len(counted) == len(after) == 3
    for (sent, received), a, b in zip(counted, before, after, strict=True):
        for ours, theirs in ((sent, b.sent - a.sent), (received, b.received - a.received)):
            assert ours > 5_000_000
            assert ours <= theirs <= 1.06 * ours + 500_000  # headers of TCP, IP and Ethernet; starting up


def test_a_testbed_left_behind_is_removed(hosts):
    testbed.Testbed(2, "1gbit").up()
    assert testbed.hosts_up() == [1, 2]


def test_run_does_not_ignore_a_rate_when_hosts_are_up(hosts):
    command = [sys.executable, testbed.__file__, "run", "--rate", "10gbit", "--", "hostname"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "expected none that is up with --rate" in done.stderr


def test_hosts_have_names_of_their_own_and_share_the_processors(hosts, monkeypatch):
    """MPI programs ask for names to find the ranks of their node; a rank could think that it has all processors."""
    monkeypatch.delenv("SPARSECOLL_THREADS", raising=False)
    with testbed.Testbed(2):
        names = testbed.run(["hostname"], timeout=60, capture=True).stdout.split()
        threads = testbed.run(["printenv", "SPARSECOLL_THREADS"], timeout=60, capture=True).stdout.split()
    assert sorted(names) == ["sparsecoll-1", "sparsecoll-2"]
    assert threads == [str(max(1, cores() // 2))] * 2


@pytest.mark.slow
def test_a_host_cut_off_in_mid_call_is_given_up(hosts):
    """The others raise after their timeout; the next test starts with other hosts."""
    program = Path(__file__).parent / "fault_programs.py"
    command = [sys.executable, testbed.__file__, "run", "--timeout", "60", "--", sys.executable, str(program), "cut"]
    printed, survivors = "", {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            printed += line
            rows = [json.loads(text) for text in line.replace("}{", "}\n{").splitlines() if text.startswith("{")]
            survivors |= {row["rank"]: row for row in rows if row["rank"] < 2}
            if len(survivors) == 2:
                testbed.down()  # mpirun itself would wait for the host
                process.terminate()
        if process.wait() == 2:  # another MPI's mpirun
            pytest.skip(process.stderr.read())
    assert set(survivors) == {0, 1}, printed
    assert all("for 1 s: no answer within the timeout" in row["error"] for row in survivors.values())
    assert all(row["seconds"] < 10 for row in survivors.values())


@pytest.mark.slow
def test_a_run_that_is_terminated_leaves_no_hosts(hosts):
    testbed.down()
    command = [sys.executable, testbed.__file__, "run", "--hosts", "2", "--", "sleep", "60"]
    with subprocess.Popen(command) as process:
        for _ in range(200):
            if len(testbed.hosts_up()) == 2:
                break
            time.sleep(0.1)
        time.sleep(0.5)
        process.terminate()
        assert process.wait(timeout=30) == 128 + 15
    assert testbed.hosts_up() == []


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 1000)
    with pytest.raises(testbed.TestbedError, match=r"expected root \(to make network namespaces\)"):
        testbed.Testbed().up()
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 0)
    monkeypatch.setattr(testbed.shutil, "which", lambda name: None)
    with pytest.raises(testbed.TestbedError, match="iproute2"):
        testbed.Testbed().up()
    assert testbed.hosts_up() == []
    with pytest.raises(ValueError, match="hosts: expected 1 to 200, got 0"):
        testbed.Testbed(0)


ECHO = """
import socket
server = socket.create_server(("", 5555))
print("up", flush=True)
client = server.accept()[0]
client.send(client.recv(9))
"""
ASK = """
import socket, time
c = socket.create_connection(("10.77.0.2", 5555))
start = time.monotonic()
c.send(b"question")
print(c.recv(9), time.monotonic() - start)
"""


def test_packets_wait_where_links_have_a_delay(hosts):
    python = ["ip", "netns", "exec", f"{testbed.BRIDGE}-2", sys.executable, "-c"]
    with testbed.Testbed(2, "100mbit", delay=20):
        echo = subprocess.Popen([*python, ECHO], stdout=subprocess.PIPE, text=True)
        assert echo.stdout.readline() == "up\n"
        python[3] = f"{testbed.BRIDGE}-1"
        answer = subprocess.run([*python, ASK], capture_output=True, text=True, timeout=60, check=True).stdout
        echo.communicate(timeout=60)
    assert answer.startswith("b'question'") and float(answer.split()[1]) >= 0.04
