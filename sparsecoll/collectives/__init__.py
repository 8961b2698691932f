"""Collectives of sparse vectors: one public function, one file; they share options.py, messages.py and convert/."""

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

__all__ = [
    "Plan",
    "allgather",
    "allreduce",
    "allreduce_init",
    "alltoall",
    "alltoallv",
    "as_vector",
    "bcast",
    "exscan",
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
]
