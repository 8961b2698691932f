"""sparsecoll: MPI-native sparse collectives.

Sum long sparse vectors over all ranks, exactly or as the top k of the sum, with far fewer bytes than MPI_Allreduce:

    y = sparsecoll.allreduce(MPI.COMM_WORLD, gradient, algo="oktopk", density=0.01)

Importing this package pulls in NumPy alone; MPI, Numba and torch come in when they are first needed.
"""

from sparsecoll import formats as formats, select as select
from sparsecoll._version import __version__ as __version__
from sparsecoll.algorithms import (
    ALGORITHMS as ALGORITHMS,
    Algorithm as Algorithm,
    Allgather as Allgather,
    Auto as Auto,
    CLTk as CLTk,
    Dense as Dense,
    DenseStream as DenseStream,
    GTopk as GTopk,
    Hierarchical as Hierarchical,
    LowBit as LowBit,
    OkTopk as OkTopk,
    Reduction as Reduction,
    SparCML as SparCML,
    SparDL as SparDL,
)
from sparsecoll.algorithms.owners import RowAuto as RowAuto, RowGather as RowGather, RowOwners as RowOwners
from sparsecoll.collectives.allgather import allgather as allgather
from sparsecoll.collectives.allreduce import allreduce as allreduce
from sparsecoll.collectives.allreduce_init import Plan as Plan, allreduce_init as allreduce_init
from sparsecoll.collectives.alltoall import alltoall as alltoall
from sparsecoll.collectives.alltoallv import alltoallv as alltoallv
from sparsecoll.collectives.bcast import bcast as bcast
from sparsecoll.collectives.convert import as_vector as as_vector, like as like
from sparsecoll.collectives.gather import gather as gather
from sparsecoll.collectives.nonblocking import (
    iallgather as iallgather,
    iallreduce as iallreduce,
    ialltoall as ialltoall,
    ialltoallv as ialltoallv,
    ibcast as ibcast,
    igather as igather,
    ireduce as ireduce,
    ireduce_scatter as ireduce_scatter,
    iscatter as iscatter,
)
from sparsecoll.collectives.reduce import reduce as reduce
from sparsecoll.collectives.reduce_scatter import reduce_scatter as reduce_scatter
from sparsecoll.collectives.scatter import scatter as scatter
from sparsecoll.collectives.signature import Comm as Comm
from sparsecoll.errors import CommunicationError as CommunicationError, NonFiniteError as NonFiniteError
from sparsecoll.residual import Residual as Residual, RowResidual as RowResidual
from sparsecoll.telemetry.traffic import Traffic as Traffic
from sparsecoll.transport import (
    DeadlockError as DeadlockError,
    Simulation as Simulation,
    shrink as shrink,
    simulate as simulate,
    traffic as traffic,
)
from sparsecoll.transport.network import Costs as Costs, Network as Network
from sparsecoll.transport.process_groups import connect as connect
from sparsecoll.transport.progress import Request as Request
from sparsecoll.vector import DenseVector as DenseVector, RowSparse as RowSparse, SparseVector as SparseVector

_public = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, type(formats))]
__all__ = ["__version__", "formats", "select", *_public]
