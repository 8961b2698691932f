"""The PyTorch adapter: SparseSGD in place of torch.optim.SGD, DistributedOptimizer around any optimizer, a DDP hook."""

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError("sparsecoll.torch: expected PyTorch with torch.distributed, got one that was built without it")

import sparsecoll_backend
from sparsecoll.torch.compressors import COMPRESSORS, Compressor
from sparsecoll.torch.compressors.schedule import Constant, Schedule, WarmUp
from sparsecoll.torch.ddp import HookState, comm_hook
from sparsecoll.torch.optimizers.diloco import DiLoCo
from sparsecoll.torch.optimizers.distributed import DistributedOptimizer
from sparsecoll.torch.optimizers.local import LocalOptimizer
from sparsecoll.torch.optimizers.onebit import OneBitAdam
from sparsecoll.torch.optimizers.sgd import SparseSGD
from sparsecoll.torch.reduction.rounds import ElasticGroup
from sparsecoll.torch.reduction.state import load, redistribute, save
from sparsecoll.torch.replica.broadcasts import broadcast
from sparsecoll.torch.replica.process_group import init_process_group

sparsecoll_backend.register()

__all__ = [
    "COMPRESSORS",
    "Compressor",
    "Constant",
    "DiLoCo",
    "DistributedOptimizer",
    "ElasticGroup",
    "HookState",
    "LocalOptimizer",
    "OneBitAdam",
    "Schedule",
    "SparseSGD",
    "WarmUp",
    "broadcast",
    "comm_hook",
    "init_process_group",
    "load",
    "redistribute",
    "save",
]
