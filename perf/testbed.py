"""A slow network on one machine: P hosts as network namespaces, connected by links of a chosen rate.

    python perf/testbed.py run --hosts 4 --rate 1gbit -- python perf/allreduce.py

A token bucket at both ends of each link limits the rate in each direction; no delay is added. MPICH starts one or more
processes per host and uses TCP between all of them. The hosts share processors and memory; a rank's kernels use as many
threads as there are processors for each rank (SPARSECOLL_THREADS). Each host has a name of its own, as nodes have.

Needs Linux, root, iproute2 (ip, tc), util-linux (unshare) and MPICH. `up` makes hosts that stay until `down`.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from functools import partial
from pathlib import Path

from sparsecoll.kernels import threads

SUBNET, BRIDGE, MOST_HOSTS = "10.77.0", "sparsecoll", 200
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

    def __init__(self, hosts=4, rate="1gbit"):
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"hosts: expected 1 to {MOST_HOSTS}, got {hosts}")
        self.hosts, self.rate = hosts, rate

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
            _ip("link", "add", BRIDGE, "type", "bridge")
            _ip("addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
            _ip("link", "set", BRIDGE, "up")
            for host in range(1, self.hosts + 1):
                self._add(host)
        except BaseException:
            down()
            raise

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
    folders = [Path("/sys/class/net", f"scb{host}", "statistics") for host in hosts_up()]
    of = {way: [int((folder / f"{way}_bytes").read_text()) for folder in folders] for way in ("rx", "tx")}
    return list(map(LinkBytes, of["rx"], of["tx"]))  # of the outer end, which receives what the host sends


def command_line(command, launcher, per_host=1):
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
    threads_each = max(1, threads.cores() // len(hosts) // per_host)
    settings = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    settings[threads.VARIABLE] = os.environ.get(threads.VARIABLE) or str(threads_each)
    start = [found, "-iface", BRIDGE, "-launcher", "ssh", "-launcher-exec", str(launcher)]
    start += ["-hosts", ",".join(f"{SUBNET}.{host}" for host in hosts), "-ppn", str(per_host)]
    start += [word for name, value in settings.items() for word in ("-genv", name, value)]
    return [*start, "-n", str(per_host * len(hosts)), *command]


def run(command, per_host=1, timeout=None, capture=False):
    """Run an MPI program on the hosts that are up; `capture`: return stdout and stderr instead of passing them on."""
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        launcher = Path(folder, "launcher")
        launcher.write_text(LAUNCHER.format(bridge=BRIDGE))
        launcher.chmod(0o755)
        line = command_line(command, launcher, per_host)
        return subprocess.run(line, timeout=timeout, capture_output=capture, text=True, stdin=subprocess.DEVNULL)


def main():
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("up", "run", "down"))
    parser.add_argument("--hosts", type=int, help="default 4")
    parser.add_argument("--rate", help="of every link, as tc writes it; default 1gbit")
    parser.add_argument("--per-host", type=int, default=1, help="processes a host")
    parser.add_argument("--timeout", type=float, help="seconds")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]  # after it: an MPI program, for `run`
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the hosts go down
    wanted = {name: value for name in ("hosts", "rate") if (value := getattr(options, name)) is not None}
    try:
        if options.action == "down":
            return down()
        if options.action == "up":
            return Testbed(**wanted).up()
        if wanted and hosts_up():
            raise TestbedError(f"testbed: expected none that is up with --{next(iter(wanted))} (testbed.py down first)")
        with contextlib.nullcontext() if hosts_up() else Testbed(**wanted):
            return run(command, options.per_host, options.timeout).returncode
    except TestbedError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    sys.exit(main())
