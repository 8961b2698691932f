"""A slow network on one machine: P hosts as network namespaces, connected by links of a chosen rate.

    python perf/testbed.py run --hosts 4 --rate 1gbit -- python perf/allreduce.py

A token bucket at both ends of each link limits the rate in each direction. With `--delay`, the links end in a process
(tun devices) that lets each packet wait, also where the kernel has no netem. MPICH starts one process per host and uses
TCP between all of them. The hosts share processors and memory; a rank's kernels use as many threads as there are
processors for each rank (SPARSECOLL_THREADS). Each host has a name of its own, as nodes have.

Needs Linux, root, iproute2 (ip, tc), util-linux (unshare) and MPICH. `up` makes hosts that stay until `down`.
"""

import argparse
import contextlib
import fcntl
import heapq
import itertools
import json
import os
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

from sparsecoll.kernels import threads

SUBNET, BRIDGE, MOST_HOSTS = "10.77.0", "sparsecoll", 200
QUEUE = 0.2  # seconds
LAUNCHER = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host={bridge}-${{1##*.}}
shift
exec ip netns exec $host unshare --uts sh -c 'echo "$0" > /proc/sys/kernel/hostname; eval "$1"' $host "$*"
"""


class TestbedError(RuntimeError):
    """The testbed cannot be set up or used; the text says what is missing."""


LinkBytes = namedtuple("LinkBytes", "sent received")  # over a host's link, headers of Ethernet, IP, TCP included


def _output(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TestbedError(f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


_ip = partial(_output, "ip")


def missing():
    """Return what this machine lacks for a testbed, or an empty list."""
    if sys.platform != "linux":
        return f"Linux (this is {sys.platform})"
    if os.geteuid() != 0:
        return "root (to make network namespaces)"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"{program} (Debian's package {package})"
    done = subprocess.run(["ip", "netns", "add", f"{BRIDGE}-probe"], capture_output=True, text=True)
    if done.returncode:
        return f"the right to make network namespaces ({done.stderr.strip()})"
    _ip("netns", "delete", f"{BRIDGE}-probe")
    return ""


class Testbed:
    """Context manager: the hosts 10.77.0.1 to 10.77.0.P, with a link each of a rate as tc writes it ("100mbit")."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    def __init__(self, hosts=4, rate="1gbit", delay=0.0):
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"hosts: expected 1 to {MOST_HOSTS}, got {hosts}")
        self.hosts, self.rate, self.delay = hosts, rate, delay

    def __enter__(self):
        self.up()
        return self

    def __exit__(self, *_):
        down()

    def up(self):
        """Set up the hosts, after removing those of an earlier testbed."""
        if lacking := missing():
            raise TestbedError(f"testbed: expected {lacking}")
        down()
        try:
            if self.delay:
                return self._switched()
            _ip("link", "add", BRIDGE, "type", "bridge")
            _ip("addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
            _ip("link", "set", BRIDGE, "up")
            for host in range(1, self.hosts + 1):
                self._add(host)
        except BaseException:
            down()
            raise

    def _switched(self):
        """Connect the hosts by a switch; the process ends with the last of its devices."""
        number, unit = re.match(r"([0-9.]+)([kmg])", self.rate).groups()
        bits = int(float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit])
        given = f"--hosts {self.hosts} --delay {self.delay} --rate {bits}".split()
        command = [sys.executable, __file__, "switch", *given]
        switch = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True)
        if switch.stdout.readline() != "ready\n":
            raise TestbedError("testbed: expected tun devices (/dev/net/tun)")

    def _add(self, host):
        space, outside, inside = f"{BRIDGE}-{host}", f"scb{host}", "eth0"
        shape = ("root", "tbf", "rate", self.rate, "burst", "128kb", "latency", "100ms")
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", space)
        _ip("link", "set", outside, "master", BRIDGE, "up")
        _output("tc", "qdisc", "add", "dev", outside, *shape)
        _ip("-n", space, "addr", "add", f"{SUBNET}.{host}/24", "dev", inside)
        _ip("-n", space, "link", "set", inside, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("netns", "exec", space, "tc", "qdisc", "add", "dev", inside, *shape)


def switch(hosts, delay, rate):
    """Pass packets on between hosts until their devices are gone.

    Each packet leaves when its sender's link and its receiver's are free, and arrives `delay` seconds later. It is
    dropped where more than QUEUE seconds of packets wait, and what fits in a millisecond is a packet of full size.
    """
    size = max(1500, min(60000, int(rate / 8e3)))
    devices = {}
    for host in [*range(1, hosts + 1), 254]:
        device, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"scb{host}" if host < 254 else BRIDGE
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1001))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
        devices[host], at = device, []
        if host < 254:
            at = ["-n", f"{BRIDGE}-{host}"]
            _ip("netns", "add", at[1])
            _ip("link", "set", name, "netns", at[1])
            _ip(*at, "link", "set", name, "name", "eth0")
            _ip(*at, "link", "set", "lo", "up")
        name = "eth0" if at else name
        _ip(*at, "addr", "add", f"{SUBNET}.{host}/24", "dev", name)
        _ip(*at, "link", "set", name, "mtu", str(size), "up")
    print("ready", flush=True)
    free, waiting, of = {(host, way): 0.0 for host in devices for way in (0, 1)}, [], {d: h for h, d in devices.items()}
    order = itertools.count()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        ready = select.select(list(of), [], [], pause)[0]
        now = time.monotonic()
        for device in ready:
            try:
                packet = os.read(device, 1 << 16)
            except BlockingIOError:
                continue
            except OSError:  # the namespace is gone
                return
            sender, receiver = of[device], packet[19] if packet[0] >> 4 == 4 else 0
            if receiver not in devices or free[sender, 0] > now + QUEUE:
                continue
            for link in ((sender, 0), (receiver, 1)):
                free[link] = max(now, free[link]) + 8 * len(packet) / rate
            leaves = max(free[sender, 0], free[receiver, 1])
            heapq.heappush(waiting, (leaves + delay, next(order), devices[receiver], packet))
        while waiting and waiting[0][0] <= now:
            *_, device, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):
                os.write(device, packet)


def hosts_up():
    """Return the numbers of the hosts that are up; an empty list without a testbed."""
    if shutil.which("ip") is None:
        return []
    names = re.findall(rf"^{BRIDGE}-(\d+)\b", _ip("netns", "list"), re.MULTILINE)
    return sorted(map(int, names))


def down():
    """Kill the processes on the hosts, and remove the hosts and the bridge, if there are any."""
    for host in hosts_up():
        for process in _ip("netns", "pids", f"{BRIDGE}-{host}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        _ip("netns", "delete", f"{BRIDGE}-{host}")
    for link in re.findall(rf"^\d+: ({BRIDGE}|scb\d+)[:@]", _ip("link", "show"), re.MULTILINE):
        subprocess.run(["ip", "link", "delete", link], capture_output=True)  # its peer may have taken it


def link_bytes():
    """Return the bytes that have crossed each host's link."""
    shown = [json.loads(_ip("-n", f"{BRIDGE}-{host}", "-s", "-j", "link", "show", "eth0")) for host in hosts_up()]
    counts = [links[0]["stats64"] for links in shown]
    return [LinkBytes(own["tx"]["bytes"], own["rx"]["bytes"]) for own in counts]


def command_line(command, launcher):
    """Return the mpirun command line that starts `command` on the hosts that are up."""
    mpirun = Path(sys.executable).parent / "mpirun"
    found = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
    if found is None:
        raise TestbedError("testbed: expected MPICH's mpirun, found none")
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if "HYDRA" not in version:
        raise TestbedError(f"testbed: expected MPICH's mpirun, got {found}: {version.splitlines()[:1]}")
    hosts = hosts_up()
    if not hosts:
        raise TestbedError("testbed: expected one that is up (python perf/testbed.py up)")
    threads_each = max(1, threads.cores() // len(hosts))
    settings = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    settings[threads.VARIABLE] = os.environ.get(threads.VARIABLE) or str(threads_each)
    start = [found, "-iface", BRIDGE, "-launcher", "ssh", "-launcher-exec", str(launcher)]
    start += ["-hosts", ",".join(f"{SUBNET}.{host}" for host in hosts), "-ppn", "1"]
    start += [word for name, value in settings.items() for word in ("-genv", name, value)]
    return [*start, "-n", str(len(hosts)), *command]


def run(command, timeout=None, capture=False):
    """Run an MPI program on the hosts that are up; `capture`: return stdout and stderr instead of passing them on."""
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        launcher = Path(folder, "launcher")
        launcher.write_text(LAUNCHER.format(bridge=BRIDGE))
        launcher.chmod(0o755)
        line = command_line(command, launcher)
        return subprocess.run(line, timeout=timeout, capture_output=capture, text=True, stdin=subprocess.DEVNULL)


def main():
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("up", "run", "down", "switch"))
    parser.add_argument("--hosts", type=int, help="default 4")
    parser.add_argument("--rate", help="of every link, as tc writes it; default 1gbit")
    parser.add_argument("--delay", type=float, help="milliseconds from one host to another; default 0")
    parser.add_argument("--timeout", type=float, help="seconds")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]  # after it: an MPI program, for `run`
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the hosts go down
    wanted = {name: value for name in ("hosts", "rate", "delay") if (value := getattr(options, name)) is not None}
    try:
        if options.action == "switch":
            return switch(options.hosts, options.delay / 1e3, float(options.rate))
        if options.action == "down":
            return down()
        if options.action == "up":
            return Testbed(**wanted).up()
        if wanted and hosts_up():
            raise TestbedError(f"testbed: expected none that is up with --{next(iter(wanted))} (testbed.py down first)")
        with contextlib.nullcontext() if hosts_up() else Testbed(**wanted):
            return run(command, options.timeout).returncode
    except TestbedError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    sys.exit(main())
