"""Ports and connections that are hostile by a seed, see hostile.World, while ranks connect; strangers come first."""

import errno
import select
import socket
from collections import deque
from types import SimpleNamespace

import hostile_sockets
from hostile_sockets import Link, Poll, Socket

from sparsecoll.transport.tcp import rendezvous

PLACES = {kind: tuple(p for p in places if p != "allocate") for kind, places in hostile_sockets.PLACES.items()}
TIMEOUT = 5.0
NUMBERS = (errno.ENOMEM, errno.ENOBUFS, errno.ECONNRESET, errno.ETIMEDOUT, errno.EMFILE)


class End(Socket):
    """One end of a connection that is new, so that there is room for what is sent."""

    def send(self, data, *_):
        self._call("send")
        link = self.outgoing
        if link.closed or link.reset:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        link.put(data)
        self._world.reach("sent")
        return len(data)

    def recv(self, size, flags=0):
        if flags:
            return super().recv(size, flags)
        memory = bytearray(size)
        return bytes(memory[: self.recv_into(memoryview(memory))])


class Caller(End):
    """The end that calls."""

    def __init__(self, world, ports):
        self._ports = ports
        super().__init__(world, world.current, Link(world, None, world.current), Link(world, world.current, None))

    def setblocking(self, flag):
        assert flag is False

    def connect_ex(self, place):
        self._call("send")
        port = self._ports.get(place[1])
        if port is None or port.closed:
            return errno.ECONNREFUSED
        self.incoming.source = self.outgoing.sink = port.rank
        port.ring(self.outgoing, self.incoming)
        port.strangers(self._world.random.choice([0, 0, 0, 0, 130]))  # more than may wait there
        return errno.EINPROGRESS


class Port:
    """A listening socket."""

    def __init__(self, world, ports):
        world.descriptors += 1
        self.world, self.rank, self.number, self.closed = world, world.current, world.descriptors, False
        self.queue = deque()  # (time of arrival, the end for this rank)
        ports[self.number] = self
        self.strangers(world.random.choice([0, 0, 1, 5, 130]))

    def strangers(self, count):
        world = self.world
        for _ in range(count):
            words, answers = Link(world, None, self.rank), Link(world, self.rank, None)
            if world.random.random() < 0.7:
                words.put(world.random.randbytes(world.random.choice([1, 16, 51, 52, 80])))
            if world.random.random() < 0.5:
                words.end()
            self.ring(words, answers)

    def ring(self, words, answers):
        """Someone calls, and says these words."""
        self.world.links += [words, answers]
        self.queue.append((self.world.seconds + self.world.delay(), End(self.world, self.rank, words, answers)))

    def fileno(self):
        return self.number

    def getsockname(self):
        return "", self.number

    def setblocking(self, flag):
        assert flag is False

    def events(self, wanted):
        return wanted & select.POLLIN if self.queue and self.queue[0][0] <= self.world.seconds else 0

    def accept(self):
        self.world.reach("receive")
        if not self.events(select.POLLIN):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        found = self.queue.popleft()[1]
        self.world.reach("received")
        return found, ""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True
        for _, end in self.queue:
            end.close()


def under(world, stack):
    """Let `connect` and the transports that it makes use the network and the clock of this world."""
    ports = {}
    stack.enter_context(hostile_sockets.under(world))
    world.traced = (rendezvous.__file__,)
    network = SimpleNamespace(
        socket=lambda family, kind: Caller(world, ports),
        SOCK_STREAM=socket.SOCK_STREAM,
        AF_UNIX=socket.AF_UNIX,
    )
    addresses = SimpleNamespace(
        INTERFACES=rendezvous.addresses.INTERFACES,
        family=lambda host: socket.AF_INET,
        is_loopback=lambda host: False,
        listen=lambda backlog: (Port(world, ports), "host"),
        listen_locally=lambda backlog: (None, ""),
        machine=lambda: 0,
    )
    polling = SimpleNamespace(poll=lambda: Poll(world), POLLIN=select.POLLIN)
    names = (rendezvous, "time", None), (rendezvous, "select", polling), (rendezvous, "socket", network)
    stack.enter_context(world.patched(hostile_sockets.connections, *names, (rendezvous, "addresses", addresses)))
