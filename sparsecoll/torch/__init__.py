"""The PyTorch adapter. `SparseSGD` replaces `torch.optim.SGD` in a script that runs under mpirun."""

from sparsecoll.torch.sgd import SparseSGD

__all__ = ["SparseSGD"]
