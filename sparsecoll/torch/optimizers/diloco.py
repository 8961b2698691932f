"""DiLoCo: LocalOptimizer with the values of the papers on training over slow links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sparsecoll.algorithms import Algorithm
from sparsecoll.errors import check_choice
from sparsecoll.torch.compressors import QSGD, ChunkedTopK, Compressor
from sparsecoll.torch.optimizers.local import LocalOptimizer

NESTEROV, STREAM = {"outer_lr": 0.7, "outer_momentum": 0.9}, {"fragments": 4, "delay": 5, "alpha": 0.5}

PRESETS: dict[str, Callable[[], dict[str, Any]]] = {
    "diloco": lambda: {"every": 30, "compressor": "none", **NESTEROV},
    "streaming": lambda: {"every": 100, "compressor": QSGD(4, feedback=True), **STREAM, **NESTEROV, "outer_lr": 0.4},
    "sparseloco": lambda: {"every": 30, "compressor": ChunkedTopK(decay=0.95), "outer_lr": 0.4},
    "muloco": lambda: {"every": 30, "compressor": QSGD(2, feedback=True), "outer_lr": 0.7, "outer_momentum": 0.5},
}


class DiLoCo(LocalOptimizer):
    """LocalOptimizer by the name of a paper: two optimizers and a number of steps.

        inner = torch.optim.AdamW(model.parameters(), 1e-3)
        optimizer = DiLoCo(inner, model, preset="sparseloco")  # then the loop as it is, and synchronize() at its end

    | preset | every | outer step | sent | source |
    |---|---|---|---|---|
    | "diloco" | 30 | SGD 0.7, Nesterov 0.9 | all values | Douillard and others, 2023 |
    | "streaming" | 100 | SGD 0.4, Nesterov 0.9 | 4 fragments in 4 bits, 5 steps late, alpha 0.5 | the same, 2025 |
    | "sparseloco" | 30 | SGD 0.4 | 64 of 4,096 values in 2 bits, residual * 0.95 | Sarfi and others, 2025 |
    | "muloco" | 30 | SGD 0.7, Nesterov 0.5 | 2 bits; with `[Muon(...), AdamW(...)]` inside | Thérien and others, 2025 |

    The bits of "streaming" and "muloco" are those of `QSGD` with error feedback, where the papers have other codes.
    On one rank, changes are compressed as on several: with `compressor="none"`, the outer step alone remains.

    Args:
        inner: optimizer of the steps of a rank, of floating-point parameters, or several that step together.
        model: the model, or its named parameters.
        comm: as in `DistributedOptimizer`.
        preset: name of the values that hold where an argument below is None (default: "diloco").
        every: as in `LocalOptimizer`, as all others.
        compressor: as in `LocalOptimizer`.
        outer: optimizers of the shared parameters, in place of the next two.
        outer_lr: as in `LocalOptimizer`.
        outer_momentum: as in `LocalOptimizer`.
        fragments: as in `LocalOptimizer`.
        delay: as in `LocalOptimizer`.
        alpha: as in `LocalOptimizer`.
        weight: as in `LocalOptimizer`.
        backup_device: as in `LocalOptimizer`.
        bucket_bytes: as in `LocalOptimizer` (default: None, one bucket for each fragment, which has fewest messages;
            with chunks, for up to 8 ranks, of 16 MB: messages of some are under way while the next ones are made).
        dense_below: as in `LocalOptimizer`.
        verify: as in `LocalOptimizer`.
        timeout: as in `LocalOptimizer`.

    Raises:
        ValueError, TypeError: On every rank, if an argument is invalid on some rank.
        CommunicationError: On every rank, if ranks have different parameters or arguments.

    Volume: that of the compressor, divided by `every`; see `LocalOptimizer`.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
        comm: Any = None,
        *,
        preset: str = "diloco",
        every: int | None = None,
        compressor: str | Compressor | Algorithm | None = None,
        outer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        fragments: int | Sequence[torch.nn.Module | Iterable[torch.Tensor]] | None = None,
        delay: int | None = None,
        alpha: float | None = None,
        weight: Callable[[], float] | None = None,
        backup_device: torch.device | str | None = None,
        bucket_bytes: int | None = None,
        dense_below: int | None = None,
        verify: bool | int = 0,
        timeout: float | None = None,
    ) -> None:
        check_choice("preset", preset, PRESETS)
        given: dict[str, Any] = {"every": every, "compressor": compressor, "fragments": fragments, "delay": delay}
        given |= {"alpha": alpha, "outer_lr": outer_lr, "outer_momentum": outer_momentum}
        values = PRESETS[preset]() | {name: value for name, value in given.items() if value is not None}
        if outer is not None:
            values = {name: v for name, v in values.items() if name not in NESTEROV or given[name] is not None}
        values |= {"outer": outer, "weight": weight, "backup_device": backup_device, "bucket_bytes": bucket_bytes}
        super().__init__(inner, model, comm, dense_below=dense_below, verify=verify, timeout=timeout, **values)

    def __repr__(self) -> str:
        return super().__repr__().replace("LocalOptimizer", "DiLoCo", 1)
