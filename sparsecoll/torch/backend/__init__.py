"""The backend "sparsecoll" of torch.distributed: `init_process_group("sparsecoll")`, see docs/backend.md."""

from sparsecoll.torch.backend.group import ProcessGroupSparsecoll, create
from sparsecoll.torch.backend.options import Options

__all__ = ["Options", "ProcessGroupSparsecoll", "create"]
