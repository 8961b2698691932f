"""MPI through mpi4py: `transport.py` sends and receives, `communicators.py` keeps a transport for each communicator."""

from sparsecoll.transport.mpi.communicators import mpi_transport, shrink, world
from sparsecoll.transport.mpi.info import about, takes_device_pointers

__all__ = ["about", "mpi_transport", "shrink", "takes_device_pointers", "world"]
