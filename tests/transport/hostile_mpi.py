"""A communicator of MPI that is hostile by a seed, see hostile.World: messages are late, its calls raise."""

from collections import deque

from hostile import NEVER
from mpi4py import MPI

from sparsecoll.transport import base
from sparsecoll.transport.mpi import messages, transport, waiting

PLACES = {
    "interrupt": ("send", "sent", "probe", "probed", "receive", "received", "test", "line"),
    "memory": ("send", "sent", "probed", "received", "allocate", "allocate", "line"),
    "error": ("send", "probe", "receive", "test"),
    "stop": ("send", "probe", "receive"),
}
TIMEOUT = 2.0  # a rank that waits polls often
NUMBERS = (MPI.ERR_OTHER, MPI.ERR_NO_MEM, MPI.ERR_INTERN)


class Message:
    """One on its way; a long one is read from its sender's memory when it is received."""

    def __init__(self, world, data, tag, arrival):
        self.tag, self.arrival, self.size, self.done = tag, arrival, data.size, data.size <= world.room
        self.data = data.copy() if self.done else data


class Request:
    """Of a send, without memory, or of a receive."""

    def __init__(self, world, message, memory=None, end=0.0):
        self._world, self._message, self._memory, self._end = world, message, memory, end

    def Test(self):
        self._world.reach("test")
        message = self._message
        if self._memory is None or self._end > self._world.seconds:
            return self._memory is None and message.done
        if self._memory is not DISCARDED:
            self._memory[:] = message.data
        message.done = True
        return True


DISCARDED = object()


class Matched:
    """A message that was probed."""

    def __init__(self, world, message):
        self._world, self._message = world, message

    def Irecv(self, into):
        world, message = self._world, self._message
        world.reach("receive")
        assert message is not None, "it was received before"
        self._message = None
        if len(into) == 2:
            assert into[0].size == message.size
        else:  # a datatype that writes it to the same memory again and again
            assert into[2].Get_size() == message.size
        request = Request(world, message, into[0] if len(into) == 2 else DISCARDED, world.seconds + world.delay())
        world.reach("received")
        return request

    def Recv(self, into):
        into[0][:] = self._message.data
        self._message.done = True


class Comm:
    """The communicator of one rank; `queues[source][destination]` has the messages that are on their way."""

    def __init__(self, world, rank, queues):
        self._world, self.rank, self._queues = world, rank, queues

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self._world.size

    def Abort(self, status):
        raise AssertionError("nobody has asked for that")

    def Isend(self, what, destination, tag):
        world = self._world
        world.reach("send")
        queue = self._queues[self.rank][destination]
        arrival = max(world.seconds + world.delay(), queue[-1].arrival if queue else 0.0)
        message = Message(world, what[0], tag, arrival)
        queue.append(message)
        world.reach("sent")
        world.pause()
        return Request(world, message)

    def _first(self, source, tag):
        world = self._world
        sources = range(world.size) if source == MPI.ANY_SOURCE else [source]
        found = [(peer, m) for peer in sources for m in self._queues[peer][self.rank] if tag in (MPI.ANY_TAG, m.tag)]
        late = not found or found[0][1].arrival > world.seconds or world.random.random() < world.short
        return None if late else found[0]

    def Iprobe(self, source, tag):
        return self._first(source, tag) is not None

    def Improbe(self, source, tag, status):
        world = self._world
        world.reach("probe")
        if (found := self._first(source, tag)) is None:
            return None
        peer, message = found
        self._queues[peer][self.rank].remove(message)
        status.Set_source(peer)
        status.Set_tag(message.tag)
        status.Set_elements(MPI.BYTE, message.size)
        world.reach("probed")
        return Matched(world, message)


class Arrivals:
    """When the messages of all queues arrive, for the clock of the world."""

    def __init__(self, world, queues):
        self._world, self._queues = world, queues

    def next_arrival(self):
        moments = [queue[0].arrival for row in self._queues for queue in row if queue]
        return min((moment for moment in moments if moment > self._world.seconds), default=NEVER)


def under(world):
    """Let MpiTransport use the clock of this world."""
    world.error = MPI.Exception
    world.traced = base.__file__, messages.__file__, transport.__file__
    let_others = ("yield_core", lambda: world.sleep(25e-6))
    return world.patched(messages, (waiting, "time", None), (waiting, *let_others), (waiting, "LONGEST_SECONDS", 3e-3))


def transports(world):
    """Return a function that makes the transport of a rank."""
    queues = [[deque() for _ in range(world.size)] for _ in range(world.size)]
    world.links.append(Arrivals(world, queues))
    world.slow = min(world.slow, 0.002)
    chunk = world.random.choice([60, 1000, 1 << 30])

    def make(rank):
        made = transport.MpiTransport(Comm(world, rank, queues))
        made.chunk = chunk
        return made

    return make
