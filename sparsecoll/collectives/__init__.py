"""Collectives of sparse vectors: one public function, one file. They share `options.py` and `convert/`."""

from sparsecoll.collectives.allgather import allgather
from sparsecoll.collectives.allreduce import allreduce
from sparsecoll.collectives.bcast import bcast
from sparsecoll.collectives.convert import as_vector, like
from sparsecoll.collectives.iallreduce import iallreduce
from sparsecoll.collectives.reduce import reduce
from sparsecoll.collectives.reduce_scatter import reduce_scatter

__all__ = ["allgather", "allreduce", "as_vector", "bcast", "iallreduce", "like", "reduce", "reduce_scatter"]
