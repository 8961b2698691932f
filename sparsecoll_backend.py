"""Entry point of the group "torch.backends", which `import torch` calls: makes the backend "sparsecoll" known.

It is a module of its own because `import torch` should not import the library in programs that do not use it.
"""

from typing import Any


def register() -> None:
    """Make `torch.distributed.init_process_group("sparsecoll")` work; the first such group imports the library."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "SPARSECOLL"):
        dist.Backend.register_backend("sparsecoll", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(group: Any, options: Any) -> Any:
    from sparsecoll.torch.backend import create

    return create(group, options)
