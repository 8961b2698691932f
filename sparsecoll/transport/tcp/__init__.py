"""TCP sockets between ranks, without MPI: `transport.py` sends and receives, `rendezvous.py` connects the ranks."""

from sparsecoll.transport.tcp.rendezvous import connect
from sparsecoll.transport.tcp.transport import TcpTransport

__all__ = ["TcpTransport", "connect"]
