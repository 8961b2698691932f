"""The PyTorch adapter: SparseSGD in place of torch.optim.SGD, DistributedOptimizer around any optimizer, a DDP hook."""

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError("sparsecoll.torch: expected PyTorch with torch.distributed, got one that was built without it")

import sparsecoll_backend
from sparsecoll.torch.compressors import COMPRESSORS as COMPRESSORS, Compressor as Compressor
from sparsecoll.torch.compressors.schedule import Constant as Constant, Schedule as Schedule, WarmUp as WarmUp
from sparsecoll.torch.ddp import HookState as HookState, comm_hook as comm_hook
from sparsecoll.torch.optimizers.diloco import DiLoCo as DiLoCo
from sparsecoll.torch.optimizers.distributed import DistributedOptimizer as DistributedOptimizer
from sparsecoll.torch.optimizers.local import LocalOptimizer as LocalOptimizer
from sparsecoll.torch.optimizers.onebit import OneBitAdam as OneBitAdam
from sparsecoll.torch.optimizers.sgd import SparseSGD as SparseSGD
from sparsecoll.torch.reduction.rounds import ElasticGroup as ElasticGroup
from sparsecoll.torch.reduction.state import load as load, redistribute as redistribute, save as save
from sparsecoll.torch.replica.broadcasts import broadcast as broadcast
from sparsecoll.torch.replica.process_group import init_process_group as init_process_group

sparsecoll_backend.register()
