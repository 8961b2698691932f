"""By which addresses other ranks reach this process."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")  # environment variables of torch.distributed: a network's name
ELSEWHERE = "192.0.2.1"  # an address that no host has (RFC 5737): the way to it is the default route


def listen(backlog: int) -> tuple[socket.socket, str]:
    """Return a listening socket, and its address, by which other ranks reach it.

    That is the address of the interface that GLOO_SOCKET_IFNAME or TP_SOCKET_IFNAME names; or else the one from which
    this host reaches MASTER_ADDR. On the host that MASTER_ADDR names, that may be a loopback address, which other hosts
    cannot reach: then, and without MASTER_ADDR, it is that of the default route or, without one, of this host's name.

    Raises:
        ValueError: The interface does not exist, or has no address.
    """
    named = next(((name, os.environ[name]) for name in INTERFACES if os.environ.get(name)), None)
    if named is not None:
        address = interface_address(named[0], named[1].split(",")[0])
    else:
        master = os.environ.get("MASTER_ADDR", "")
        address = route_to(master) if master else ""
        if is_loopback(address) and not (master and is_loopback(master)):
            address = route_to(ELSEWHERE) or route_to(socket.gethostname()) or "127.0.0.1"
    return socket.create_server((address, 0), family=family(address), backlog=backlog), address


def listen_locally(backlog: int) -> tuple[socket.socket | None, str]:
    """Return a listening Unix domain socket for ranks on this machine, and its name; None and "" where there are none.

    The name is in Linux's abstract namespace, which needs no file, and which containers do not share.
    """
    if not sys.platform.startswith("linux"):
        return None, ""
    name = f"sparsecoll-{secrets.token_hex(16)}"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(f"\0{name}")
        server.listen(backlog)
    except OSError:  # forbidden to this process
        server.close()
        return None, ""
    return server, name


def family(address: str) -> int:
    """Return the family of an address in digits."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Return whether a name or address is one that only processes on the same machine can use."""
    if not host or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def route_to(host: str) -> str:
    """Return the address from which this host sends to another one; "" if there is no way. Sends nothing."""
    with suppress(OSError):  # the name is unknown
        for kind, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
                if not own.lower().startswith("fe80"):  # link-local: means nothing on other hosts
                    return own
    return ""


def interface_address(variable: str, name: str) -> str:
    """Return the address of a network interface; raise ValueError if it does not exist, or has no address."""
    if not (found := _ipv4(name) or _ipv6(name)):
        known = ", ".join(interface for _, interface in socket.if_nameindex())
        raise ValueError(f"{variable}: expected a network interface with an address, got {name!r} among {known}")
    return found


def _ipv4(name: str) -> str:
    import fcntl

    number = 0x8915 if sys.platform.startswith("linux") else 0xC0206921  # SIOCGIFADDR; that of macOS and BSD
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(probe, number, request)[20:24])
    return ""


def _ipv6(name: str) -> str:
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope != "20":  # not link-local
                return str(ipaddress.ip_address(bytes.fromhex(digits)))
    return ""
