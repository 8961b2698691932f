"""A slow network on one machine: P hosts as network namespaces, connected by links of a chosen rate.

Each host is a network namespace with one virtual Ethernet link to a bridge; a token bucket at both ends of the link
limits the rate in each direction. MPICH starts one or more processes per host and uses TCP between all of them, so that
every message crosses the links. The hosts share processors and memory, so computation is slower than on separate hosts;
a rank's kernels use one thread, or as many as there are processors for each rank (SPARSECOLL_THREADS). Each host has a
name of its own, so that ranks appear to be on different nodes. No delay is added.

Needs Linux, root, iproute2 (ip, tc), util-linux (unshare) and MPICH. From the command line:

    python perf/testbed.py up --hosts 4 --rate 1gbit
    python perf/testbed.py run -- python perf/allreduce.py
    python perf/testbed.py down

`run` without `up` makes hosts for this one command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsecoll.kernels import threads

SUBNET = "10.77.0"
BRIDGE = "sparsecoll"
MOST_HOSTS = 200
LAUNCHER = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host={bridge}-${{1##*.}}
shift
exec ip netns exec $host unshare --uts sh -c 'echo "$0" > /proc/sys/kernel/hostname; eval "$1"' $host "$*"
"""


class TestbedError(RuntimeError):
    """The testbed cannot be set up or used; the text says what is missing."""


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that crossed one host's link so far, as the kernel counts them: Ethernet, IP and TCP headers included."""

    sent: int
    received: int


def _ip(*arguments: str) -> str:
    return _output("ip", *arguments)


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def missing() -> str:
    """Return what this machine lacks for a testbed, or an empty list."""
    if sys.platform != "linux":
        return f"Linux (this is {sys.platform})"
    if os.geteuid() != 0:
        return "root (to make network namespaces)"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"{program} (Debian's package {package})"
    done = subprocess.run(["ip", "netns", "add", f"{BRIDGE}-probe"], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"the right to make network namespaces ({done.stderr.strip()})"
    _ip("netns", "delete", f"{BRIDGE}-probe")
    return ""


@dataclass
class Testbed:
    """Context manager: the hosts 10.77.0.1 to 10.77.0.P, with one link each.

    Args:
        hosts: P, 1 to 200.
        rate: of every link in each direction, as tc writes it: "1gbit", "100mbit", "10gbit".
        burst: bytes that may pass at once, as tc writes it.

    Raises:
        TestbedError: no root, no iproute2, no MPICH, or a step failed; the text says which.
    """

    __test__ = False  # not a test class, whatever pytest thinks of its name

    hosts: int = 4
    rate: str = "1gbit"
    burst: str = "128kb"

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise ValueError(f"hosts: expected 1 to {MOST_HOSTS}, got {self.hosts}")

    def __enter__(self) -> Testbed:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        down()

    def up(self) -> None:
        """Set up the hosts, after removing those of an earlier testbed."""
        lacking = missing()
        if lacking:
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

    def _add(self, host: int) -> None:
        space, outside, inside = f"{BRIDGE}-{host}", f"scb{host}", "eth0"
        shape = ("root", "tbf", "rate", self.rate, "burst", self.burst, "latency", "100ms")
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", space)
        _ip("link", "set", outside, "master", BRIDGE, "up")
        _output("tc", "qdisc", "add", "dev", outside, *shape)
        _ip("-n", space, "addr", "add", f"{SUBNET}.{host}/24", "dev", inside)
        _ip("-n", space, "link", "set", inside, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        _output("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", inside, *shape)


def hosts_up() -> list[int]:
    """Return the numbers of the hosts that are up; an empty list without a testbed."""
    if shutil.which("ip") is None:
        return []
    names = re.findall(rf"^{BRIDGE}-(\d+)\b", _ip("netns", "list"), re.MULTILINE)
    return sorted(map(int, names))


def down() -> None:
    """Kill the processes on the hosts, and remove the hosts and the bridge, if there are any."""
    for host in hosts_up():
        for process in _ip("netns", "pids", f"{BRIDGE}-{host}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        _ip("netns", "delete", f"{BRIDGE}-{host}")
    for link in re.findall(rf"^\d+: ({BRIDGE}|scb\d+)[:@]", _ip("link", "show"), re.MULTILINE):
        subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)  # its peer may have taken it


def link_bytes() -> list[LinkBytes]:
    """Return the bytes that have crossed each host's link."""
    counts = []
    for host in hosts_up():
        where = f"/sys/class/net/scb{host}/statistics"
        counts.append(  # the outer end: it receives what the host sends
            LinkBytes(sent=int(Path(where, "rx_bytes").read_text()), received=int(Path(where, "tx_bytes").read_text()))
        )
    return counts


def command_line(command: Sequence[str], launcher: str | Path, per_host: int = 1) -> list[str]:
    """Return the mpirun command line that starts `command` on the hosts that are up."""
    mpirun = Path(sys.executable).parent / "mpirun"
    found = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
    if found is None:
        raise TestbedError("testbed: expected MPICH's mpirun, found none")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "HYDRA" not in version:
        raise TestbedError(f"testbed: expected MPICH's mpirun, got {found}: {version.splitlines()[:1]}")
    hosts = hosts_up()
    if not hosts:
        raise TestbedError("testbed: expected one that is up (python perf/testbed.py up)")
    settings = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    settings[threads.VARIABLE] = os.environ.get(threads.VARIABLE) or str(
        max(1, threads.cores() // len(hosts) // per_host)
    )
    start = [found, "-iface", BRIDGE, "-launcher", "ssh", "-launcher-exec", str(launcher)]
    start += ["-hosts", ",".join(f"{SUBNET}.{host}" for host in hosts), "-ppn", str(per_host)]
    for name, value in settings.items():
        start += ["-genv", name, value]
    return [*start, "-n", str(per_host * len(hosts)), *command]


def run(
    command: Sequence[str], per_host: int = 1, timeout: float | None = None, capture: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run an MPI program on the hosts that are up, one process a host (or `per_host`).

    Args:
        timeout: seconds, then everything on the hosts is killed and subprocess.TimeoutExpired raised.
        capture: return stdout and stderr instead of passing them on.
    """
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        launcher = Path(folder, "launcher")
        launcher.write_text(LAUNCHER.format(bridge=BRIDGE))
        launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
        return subprocess.run(
            command_line(command, launcher, per_host),
            timeout=timeout,
            capture_output=capture,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )


def main() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    for name, text in (("up", "make the hosts"), ("run", "run an MPI program on them"), ("down", "remove them")):
        action = commands.add_parser(name, help=text)
        if name != "down":
            action.add_argument("--hosts", type=int, help=f"default {Testbed.hosts}")
            action.add_argument("--rate", help=f"of every link, as tc writes it; default {Testbed.rate}")
        if name == "run":
            action.add_argument("--per-host", type=int, default=1, help="processes a host")
            action.add_argument("--timeout", type=float, help="seconds")
            action.add_argument("command", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the hosts go down
    try:
        if options.action == "down":
            down()
            return 0
        wanted = {name: value for name in ("hosts", "rate") if (value := getattr(options, name)) is not None}
        if options.action == "up":
            Testbed(**wanted).up()
            return 0
        if not hosts_up():
            with Testbed(**wanted):
                return run(options.command, options.per_host, options.timeout).returncode
        if wanted:
            raise TestbedError(f"testbed: expected none that is up with --{next(iter(wanted))} (testbed.py down first)")
        return run(options.command, options.per_host, options.timeout).returncode
    except TestbedError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    sys.exit(main())
