"""Hosts that are switched off, with data on its way or without, and hosts that are only busy."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_tcp import run

from sparsecoll.transport.tcp import addresses, connection as connections, transport as tcp

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import json, os, sys, time
from pathlib import Path
import numpy as np
import sparsecoll
from sparsecoll.transport.tcp import connect, connection, rendezvous, transport

folder, rank, mode, quick = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "quick"

class Meeting:
    size = 2
    def __init__(self, rank): self.rank = rank
    def put(self, entry):
        (folder / f"new{self.rank}").write_text(entry)
        (folder / f"new{self.rank}").rename(folder / str(self.rank))
    def entries(self):
        files = [folder / str(rank) for rank in range(2)]
        return [file.read_text() for file in files] if all(file.exists() for file in files) else None
    def absent(self): return [rank for rank in range(2) if not (folder / str(rank)).exists()]
    def clear(self): pass
    def fail(self, why): print(why, flush=True)
    def failed(self): return ""

if quick:
    connection.SILENT_SECONDS, transport.HOST_SECONDS = 3.0, 0.5
    rendezvous.KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
comm = connect(Meeting(rank), 60)
x = np.ones(1_000_000 if mode == "inflight" else 10)
sparsecoll.allreduce(comm, x, "dense")
print("connected", flush=True)
for turn in range(10**9):
    began = time.monotonic()
    try:
        if mode == "waiting" and rank == 1 and turn == 20:
            time.sleep(10**6)
        sparsecoll.allreduce(comm, x, "dense")
    except sparsecoll.CommunicationError as error:
        print(json.dumps([str(error), time.monotonic() - began]), flush=True)
        break
"""


@pytest.fixture
def hosts():
    """Two network namespaces with a link between them."""
    names = [f"sparsecoll-lost-{os.getpid()}-{i}" for i in range(2)]

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "a0", "netns", names[0], "type", "veth", "peer", "name", "a0", "netns", names[1])
            for i, name in enumerate(names):
                ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "a0")
                for device in ("lo", "a0"):
                    ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs Linux, root and iproute2 (to make network namespaces)")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def cut(names):
    """Let packets go to an address that nobody has."""
    for i, name in enumerate(names):
        far = ["neigh", "replace", f"10.77.0.{2 - i}", "lladdr", "02:00:00:00:00:99", "dev", "a0", "nud", "permanent"]
        subprocess.run(["ip", "-n", name, *far], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inflight", "waiting"])
def test_a_host_that_is_cut_off_is_lost_without_a_timeout(hosts, mode, tmp_path):
    """After a few seconds here; after a minute with SPARSECOLL_MINUTE=1, as for users."""
    quick = os.environ.get("SPARSECOLL_MINUTE") != "1"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "a0", "PYTHONPATH": str(ROOT)}
    ranks = []
    try:
        for rank, name in enumerate(hosts):
            options = [str(tmp_path), str(rank), mode, "quick" if quick else "slow"]
            command = ["ip", "netns", "exec", name, sys.executable, "-c", PROGRAM, *options]
            ranks.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE))
        assert [rank.stdout.readline() for rank in ranks] == ["connected\n"] * 2
        time.sleep(1)
        cut(hosts)
        text, seconds = json.loads(ranks[0].stdout.readline())
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    print(f"{mode}: {text} after {seconds:.0f} s")
    assert text.startswith("rank 0 lost rank 1: ")
    assert mode == "waiting" or "its host has acknowledged nothing for" in text
    assert seconds < (30 if quick else 100)


def test_a_rank_that_takes_nothing_for_long_is_not_lost(monkeypatch):
    """Its host acknowledges that there is no room; TCP_USER_TIMEOUT would end the connection."""
    monkeypatch.setattr(connections, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(tcp, "HOST_SECONDS", 0.1)
    monkeypatch.setattr(addresses, "listen_locally", lambda backlog: (None, ""))

    def program(transport):
        if transport.rank == 0:
            transport.isend(1, np.ones(30_000_000, np.uint8))
            transport.waitall()
            return 30_000_000
        time.sleep(3)
        return int(transport.recv(0).sum())

    assert run(2, program) == [30_000_000] * 2
