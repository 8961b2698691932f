"""sparsecoll: MPI-native sparse collectives.

Sum long sparse vectors over all ranks, exactly or as the top k of the sum, with far fewer bytes than MPI_Allreduce:

    y = sparsecoll.allreduce(MPI.COMM_WORLD, gradient, algo="oktopk", density=0.01)

Importing this package pulls in NumPy alone; MPI, Numba and torch come in when they are first needed.
"""

from sparsecoll import formats, select
from sparsecoll._version import __version__
from sparsecoll.algorithms import (
    ALGORITHMS,
    Algorithm,
    Allgather,
    ARCTopK,
    Auto,
    CLTk,
    Dense,
    DenseStream,
    ExDyna,
    GTopk,
    Hierarchical,
    HiTopK,
    LowBit,
    OkTopk,
    Reduction,
    SparCML,
    SparDL,
)
from sparsecoll.algorithms.rows import RowAuto, RowGather, RowOwners
from sparsecoll.collectives.allgather import allgather
from sparsecoll.collectives.allreduce import allreduce
from sparsecoll.collectives.allreduce_init import Plan, allreduce_init
from sparsecoll.collectives.alltoall import alltoall
from sparsecoll.collectives.alltoallv import alltoallv
from sparsecoll.collectives.bcast import bcast
from sparsecoll.collectives.convert import as_vector, like
from sparsecoll.collectives.exscan import exscan
from sparsecoll.collectives.gather import gather
from sparsecoll.collectives.nonblocking import (
    iallgather,
    iallreduce,
    ialltoall,
    ialltoallv,
    ibcast,
    iexscan,
    igather,
    ireduce,
    ireduce_scatter,
    iscan,
    iscatter,
)
from sparsecoll.collectives.reduce import reduce
from sparsecoll.collectives.reduce_scatter import reduce_scatter
from sparsecoll.collectives.scan import scan
from sparsecoll.collectives.scatter import scatter
from sparsecoll.collectives.signature import Comm
from sparsecoll.errors import CommunicationError, NonFiniteError
from sparsecoll.residual import Residual, RowResidual
from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.transport import DeadlockError, Simulation, shrink, simulate, traffic
from sparsecoll.transport.network import Costs, Network
from sparsecoll.transport.progress import Request
from sparsecoll.transport.stores import connect
from sparsecoll.vector import DenseVector, RowSparse, SparseVector

__all__ = [
    "ALGORITHMS",
    "ARCTopK",
    "Algorithm",
    "Allgather",
    "Auto",
    "CLTk",
    "Comm",
    "CommunicationError",
    "Costs",
    "DeadlockError",
    "Dense",
    "DenseStream",
    "DenseVector",
    "ExDyna",
    "GTopk",
    "HiTopK",
    "Hierarchical",
    "LowBit",
    "Network",
    "NonFiniteError",
    "OkTopk",
    "Plan",
    "Reduction",
    "Request",
    "Residual",
    "RowAuto",
    "RowGather",
    "RowOwners",
    "RowResidual",
    "RowSparse",
    "Simulation",
    "SparCML",
    "SparDL",
    "SparseVector",
    "Traffic",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_init",
    "alltoall",
    "alltoallv",
    "as_vector",
    "bcast",
    "connect",
    "exscan",
    "formats",
    "gather",
    "iallgather",
    "iallreduce",
    "ialltoall",
    "ialltoallv",
    "ibcast",
    "iexscan",
    "igather",
    "ireduce",
    "ireduce_scatter",
    "iscan",
    "iscatter",
    "like",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "select",
    "shrink",
    "simulate",
    "traffic",
]
