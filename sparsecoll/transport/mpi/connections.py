"""Sleeping until something happens on a TCP connection of this process, by which MPI's messages come from elsewhere.

MPI offers no way to wait for a message without polling, but where it uses TCP, the operating system knows when bytes
have come. Nothing is read here: a rank sleeps until a connection is readable, or writable where it was full, and then
polls. Nobody promises that messages come by these connections, or that all of them do. The sleep therefore has a limit,
which is as short as without them unless the last message that came in a sleep has ended it.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time

SCAN_SECONDS = 1.0  # between searches for connections, since MPI opens and closes some at any time
SHORTEST = 1e-3  # seconds; poll() counts milliseconds, so that a shorter sleep is over before it looks
INSTANT = 1e-4  # seconds; bytes that nobody reads end a sleep as soon as it begins,
MOST_INSTANT = 10  # and after so many of these in a row, connections are not watched until the next search
DIRECTORY = "/proc/self/fd"  # Linux; elsewhere a rank sleeps for the given time


class Connections:
    """The connections of this process.

    Attributes:
        announcing: whether the last message that came in a sleep ended it.
    """

    def __init__(self) -> None:
        self.announcing = False
        self._watched: select.poll | None = None
        self._room = select.poll()  # tells those that take bytes
        self._all: list[int] = []
        self._scanned = -math.inf
        self._woken = False
        self._instant = 0

    def sleep(self, seconds: float, moving: bool = False) -> None:
        """Sleep until something has come, at most for `seconds`.

        Args:
            seconds: the limit.
            moving: whether a message is on its way, so that this rank also waits for room to send (default: False).
        """
        now = time.monotonic()
        if now - self._scanned >= SCAN_SECONDS:
            self._scan()
            self._scanned = now = time.monotonic()
        self._woken = False
        if self._watched is None:
            self.announcing = False
            time.sleep(seconds)
            return
        if seconds < SHORTEST:
            time.sleep(seconds)
            seconds = 0.0
        full = self._full() if moving else []
        for number in full:
            self._watched.modify(number, select.POLLIN | select.POLLOUT)
        events = self._watched.poll(int(1e3 * seconds))
        for number in full:
            self._watched.modify(number, select.POLLIN)
        self._woken = bool(events)
        for number, event in events:
            if event & select.POLLNVAL:  # closed since
                self._watched.unregister(number)
                self._room.unregister(number)
                self._all.remove(number)
        if moving:  # its bytes end one sleep after the other
            return
        self._instant = self._instant + 1 if self._woken and time.monotonic() - now < INSTANT else 0
        if self._instant >= MOST_INSTANT:
            self._watched, self._instant, self.announcing = None, 0, False

    def came(self) -> None:
        """After the last sleep there was a message, or a part of it."""
        self.announcing, self._instant = self._woken, 0

    def _full(self) -> list[int]:
        """Return the connections that take no more bytes now."""
        writable = self._room.poll(0)
        if len(writable) == len(self._all):
            return []
        numbers = {number for number, _ in writable}
        return [number for number in self._all if number not in numbers]

    def _scan(self) -> None:
        self._all, self._watched = [], None
        if (
            socket.getdefaulttimeout() is not None
        ):  # with one, Python would make the sockets that it looks at nonblocking
            return
        try:
            numbers = [int(name) for name in os.listdir(DIRECTORY)]
        except OSError:
            return
        self._all = [number for number in numbers if _is_connection(number)]
        if self._all:
            self._watched, self._room = select.poll(), select.poll()
            for number in self._all:
                self._watched.register(number, select.POLLIN)
                self._room.register(number, select.POLLOUT)


def _is_connection(number: int) -> bool:
    """Return whether a file descriptor is a TCP connection to another process."""
    try:
        if not os.readlink(f"{DIRECTORY}/{number}").startswith("socket:"):
            return False
        end = socket.socket(fileno=number)
    except OSError:
        return False
    try:
        stream = end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM
        return stream and bool(end.getpeername())
    except OSError:  # it listens, or is not connected yet
        return False
    finally:
        end.detach()
