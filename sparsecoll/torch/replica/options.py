"""Options that SparseSGD, DistributedOptimizer and HookState share, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll.errors import check_integer
from sparsecoll.transport import check_timeout


@dataclass
class Options:
    """The keyword arguments of DistributedOptimizer, of which the others have the last two.

    `verify` becomes a number of steps, where 0 stands for never.

    Raises:
        ValueError, TypeError: An option is invalid.
    """

    bucket_bytes: int | None = 25 << 20
    dense_below: int = 1024
    overlap: bool = True
    gradient_as_bucket_view: bool = False
    verify: bool | int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None:
            check_integer("bucket_bytes", self.bucket_bytes, 1)
        check_integer("dense_below", self.dense_below, 0)
        for name in ("overlap", "gradient_as_bucket_view"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if isinstance(self.verify, bool):
            self.verify = 100 * self.verify
        check_integer("verify", self.verify, 0)
        check_timeout(self.timeout)
