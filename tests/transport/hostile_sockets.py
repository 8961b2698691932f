"""Sockets that are hostile by a seed, see hostile.World: they move parts, delay, reset and lose bytes, and raise."""

import errno
import select
import socket
from collections import deque
from types import SimpleNamespace

from hostile import NEVER

from sparsecoll.transport import base
from sparsecoll.transport.tcp import connection as connections, transport as tcp

PLACES = {
    "interrupt": ("send", "sent", "receive", "received", "line"),
    "memory": ("sent", "received", "allocate", "allocate", "line"),
    "error": ("send", "receive"),
    "stop": ("send", "receive"),
    "kill": ("send", "sent", "receive", "received"),
    "cut": ("send", "receive"),
}
TIMEOUT = 5.0
NUMBERS = (errno.ENOMEM, errno.ENOBUFS, errno.ECONNRESET, errno.ETIMEDOUT)


class Link:
    """One direction of a connection; bytes arrive in order, later than they were sent."""

    def __init__(self, world, source, sink):
        self.world, self.source, self.sink = world, source, sink
        self.chunks = deque()  # (time of arrival, bytes)
        self.size = 0
        self.shut = NEVER  # when its end arrives
        self.reset = self.closed = self.cut = False
        self.latest = 0.0

    def put(self, data):
        world = self.world
        self.latest = NEVER if self.cut else max(self.latest, world.seconds + world.delay())
        self.chunks.append((self.latest, data))
        self.size += len(data)

    def arrived(self):
        return bool(self.chunks) and self.chunks[0][0] <= self.world.seconds

    def ended(self):
        return not self.chunks and self.shut <= self.world.seconds

    def next_arrival(self):
        return self.chunks[0][0] if self.chunks else self.shut if self.shut > self.world.seconds else NEVER

    def end(self):
        """The sender closes its end."""
        if self.shut == NEVER and not self.cut:
            self.shut = max(self.latest, self.world.seconds)


class Socket:
    """One end of a connection."""

    family = socket.AF_UNIX

    def __init__(self, world, rank, incoming, outgoing):
        self._world, self.incoming, self.outgoing = world, incoming, outgoing
        world.descriptors += 1
        self._number = world.descriptors
        world.sockets[rank].append(self)

    def fileno(self):
        return self._number

    def setblocking(self, flag):
        assert flag is False

    def events(self, wanted):
        found = 0
        if self.incoming.arrived() or self.incoming.ended() or self.incoming.reset:
            found |= select.POLLIN
        if self.outgoing.size < self._world.room or self.outgoing.closed or self.outgoing.reset:
            found |= select.POLLOUT
        found &= wanted
        if self.incoming.reset:
            found |= select.POLLERR | select.POLLHUP
        return found

    def _call(self, place):
        if self._number < 0:
            raise OSError(errno.EBADF, "Bad file descriptor")
        self._world.reach(place)
        self._world.pause()

    def _part(self, size):
        world = self._world
        if world.random.random() < world.short:
            size = world.random.randrange(min(size, 1 << world.random.randrange(10)) + 1)
        if size == 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return size

    def sendmsg(self, views, *_):
        self._call("send")
        link = self.outgoing
        if link.shut != NEVER:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        if link.closed or link.reset:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        data = b"".join(views)
        size = self._part(max(0, min(len(data), self._world.room - link.size)))
        link.put(data[:size])
        self._world.reach("sent")
        return size

    def recv_into(self, view):
        self._call("receive")
        link = self.incoming
        if link.reset:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if link.ended():
            return 0
        if not link.arrived():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        time, data = link.chunks[0]
        size = self._part(min(len(data), len(view)))
        view[:size] = data[:size]
        link.chunks.popleft()
        if size < len(data):
            link.chunks.appendleft((time, data[size:]))
        link.size -= size
        self._world.reach("received")
        return size

    def recv(self, size, flags):
        assert flags == socket.MSG_PEEK
        self._call("receive")
        link = self.incoming
        if link.reset:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if link.ended():
            return b""
        if not link.arrived():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return bytes(link.chunks[0][1][:size])

    def shutdown(self, how):
        self.outgoing.end()
        if how == socket.SHUT_RDWR:
            self.incoming.shut = min(self.incoming.shut, self._world.seconds)

    def close(self):
        if self._number < 0:
            return
        self._number = -1
        self.outgoing.end()
        self.incoming.closed = True
        if self.incoming.chunks and not self.incoming.cut:  # as the kernel does with bytes that nobody has read
            self.outgoing.reset = True


class Poll:
    """select.poll on these sockets."""

    def __init__(self, world):
        self._world, self._wanted = world, {}

    def register(self, member, events):
        self._wanted[member.fileno()] = member, events

    def unregister(self, member):
        del self._wanted[member.fileno()]

    def _ready(self):
        return [(number, found) for number, (m, wanted) in self._wanted.items() if (found := m.events(wanted))]

    def poll(self, milliseconds):
        world = self._world
        world.wait(lambda: bool(self._ready()), world.seconds + max(milliseconds, 0.001) / 1000)  # time passes
        ready = self._ready()
        world.random.shuffle(ready)
        return ready


def pair(world, a, b):
    links = Link(world, a, b), Link(world, b, a)
    world.links += links
    return Socket(world, a, links[1], links[0]), Socket(world, b, links[0], links[1])


def under(world):
    """Let TcpTransport use the network and the clock of this world."""
    world.error = lambda number: OSError(number, f"injected {errno.errorcode[number]}")
    world.traced = base.__file__, connections.__file__, tcp.__file__
    network = SimpleNamespace(
        socketpair=lambda: pair(world, world.current, world.current),
        socket=socket.socket,
        SHUT_RDWR=socket.SHUT_RDWR,
        SHUT_WR=socket.SHUT_WR,
    )
    polling = SimpleNamespace(poll=lambda: Poll(world), POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    return world.patched(connections, (tcp, "time", None), (tcp, "select", polling), (tcp, "socket", network))


def transports(world):
    """Return a function that makes the transport of a rank, connected to all others."""
    sockets = [{} for _ in range(world.size)]
    for a in range(world.size):
        for b in range(a + 1, world.size):
            sockets[a][b], sockets[b][a] = pair(world, a, b)
    return lambda rank: tcp.TcpTransport(rank, sockets[rank], [0] * world.size)
