"""Calls for which `auto` measures the network, on virtual ranks."""

import numpy as np

from sparsecoll import SparseVector

LONG = SparseVector(np.arange(0, 4_000_000, 20), np.ones(200_000, np.float32), 4_000_000)  # worth measuring for


def unmodelled(comm):
    """A virtual rank's transport that has to measure like a real one."""
    comm.transport.modelled = lambda: None
    return comm.transport
