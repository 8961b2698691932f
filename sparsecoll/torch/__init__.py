"""The PyTorch adapter: SparseSGD in place of torch.optim.SGD, DistributedOptimizer around any optimizer, a DDP hook."""

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError("sparsecoll.torch: expected PyTorch with torch.distributed, got one that was built without it")

from sparsecoll.torch.broadcasts import broadcast
from sparsecoll.torch.checkpoint import load, save
from sparsecoll.torch.compressors import COMPRESSORS, Compressor
from sparsecoll.torch.ddp import HookState, comm_hook
from sparsecoll.torch.local import LocalOptimizer
from sparsecoll.torch.optimizer import DistributedOptimizer
from sparsecoll.torch.process_group import init_process_group
from sparsecoll.torch.rowwise_adagrad import RowWiseAdagrad
from sparsecoll.torch.schedule import Constant, Schedule, WarmUp
from sparsecoll.torch.sgd import SparseSGD
from sparsecoll.torch.state import redistribute
from sparsecoll.torch.timeline import Timeline

__all__ = [
    "COMPRESSORS",
    "Compressor",
    "Constant",
    "DistributedOptimizer",
    "HookState",
    "LocalOptimizer",
    "RowWiseAdagrad",
    "Schedule",
    "SparseSGD",
    "Timeline",
    "WarmUp",
    "broadcast",
    "comm_hook",
    "init_process_group",
    "load",
    "redistribute",
    "save",
]
