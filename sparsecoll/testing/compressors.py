"""The contract of compressors, see `sparsecoll.testing.check_compressor`."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from sparsecoll.testing.cases import case_of, check_class, expect
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.compressors.base import ErrorFeedback
from sparsecoll.torch.optimizers.distributed import DistributedOptimizer
from sparsecoll.transport import simulate


def check(compressor: Compressor, conserves: bool | None = None) -> None:
    """See `sparsecoll.testing.check_compressor`."""
    expect(isinstance(compressor, Compressor), f"compressor: expected a Compressor object, got {compressor!r}")
    check_class("compressor", compressor)
    for P in (1, 3):
        with case_of(f"{compressor.name}: replicas on {P} ranks"):
            _replicas(compressor, P)
    if isinstance(compressor, ErrorFeedback) if conserves is None else conserves:
        with case_of(f"{compressor.name}: gradients and residuals"):
            _conservation(compressor)
    with case_of(f"{compressor.name}: a resumed run"):
        _resumed(compressor)
    with case_of(f"{compressor.name}: NaN on one rank"):
        _nan(compressor)


def _net(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    parts = (torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
    return torch.nn.Sequential(*parts).to(dtype)


def _loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * rank + step)
    x = torch.randn(16, 12, generator=generator, dtype=torch.float64, device="cpu").to(next(model.parameters()).dtype)
    return torch.nn.functional.cross_entropy(model(x), torch.randint(0, 3, (16,), generator=generator, device="cpu"))


def _bits(model: torch.nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def _wrapped(
    comm: Any, compressor: Compressor, model: torch.nn.Module, momentum: float = 0.0, **options: Any
) -> DistributedOptimizer:
    """Return an optimizer with several buckets, whose compressed parameters include vectors."""
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum)
    options = {"bucket_bytes": 6000, "dense_below": 10, **options}
    return DistributedOptimizer(inner, model.named_parameters(), comm, compressor, **options)


def _train(rank: int, model: torch.nn.Module, optimizer: DistributedOptimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        _loss(model, rank, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _replicas(compressor: Compressor, P: int) -> None:
    def program(comm: Any) -> tuple[bytes, float, float]:
        model = _net(comm.rank, torch.float32)
        optimizer = _wrapped(comm, compressor, model, verify=7)
        first = _loss(model, comm.rank, 0).item()
        _train(comm.rank, model, optimizer, [0] * 40)
        return _bits(model), first, _loss(model, comm.rank, 0).item()

    bits, before, after = zip(*simulate(P, program).results, strict=True)
    expect(len(set(bits)) == 1, "expected the same bits on all ranks")
    expect(np.mean(after) < 0.95 * np.mean(before), f"the loss went from {np.mean(before)} to {np.mean(after)}")


def _conservation(compressor: Compressor) -> None:
    """Check that P * (w0 - w) / lr + the residuals of all ranks = the gradients of all ranks and steps."""

    def program(comm: Any) -> tuple[Any, Any, Any]:
        model = _net()
        optimizer = _wrapped(comm, compressor, model, overlap=False)  # gradients stay local until the step
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        given = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for step in range(8):
            optimizer.zero_grad()
            _loss(model, comm.rank, step).backward()  # type: ignore[no-untyped-call]
            for name, p in model.named_parameters():
                given[name] += p.grad  # type: ignore[arg-type]
            optimizer.step()
        moved = {name: (start[name] - p.detach()) / 0.1 for name, p in model.named_parameters()}
        return given, optimizer.state_dict()["sparsecoll"]["tensors"].get("residual", {}), moved

    results = simulate(4, program).results
    for name, moved in results[0][2].items():
        total, kept = sum(r[0][name] for r in results), sum(r[1][name] for r in results if name in r[1])
        torch.testing.assert_close(4 * moved + kept, total, rtol=1e-8, atol=1e-10)


def _resumed(compressor: Compressor) -> None:
    def program(comm: Any) -> bool:
        whole, model, later = (_net(dtype=torch.float32) for _ in range(3))
        _train(comm.rank, whole, _wrapped(comm, compressor, whole, 0.5), range(7))
        optimizer = _wrapped(comm, compressor, model, 0.5)
        _train(comm.rank, model, optimizer, range(4))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        optimizer = _wrapped(comm, compressor, later, 0.5)
        later.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        _train(comm.rank, later, optimizer, range(4, 7))
        return _bits(later) == _bits(whole)

    expect(all(simulate(2, program).results), "expected the bits of a run that was not interrupted")


def _nan(compressor: Compressor) -> None:
    def program(comm: Any) -> Any:
        model = _net()
        optimizer = _wrapped(comm, compressor, model, overlap=False)
        _loss(model, comm.rank, 0).backward()  # type: ignore[no-untyped-call]
        weight = model.get_parameter("2.weight")
        if comm.rank == 1:
            weight.grad.fill_(float("nan"))  # type: ignore[union-attr]
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
        return bool(torch.isnan(weight).all())

    results = simulate(3, program).results
    raised = isinstance(results[0], str) and len(set(results)) == 1 and "NaN" in results[0]
    passed = results == [True] * 3 and not isinstance(compressor, ErrorFeedback)  # a residual would keep it
    expect(raised or passed, f"expected an error on all ranks, or NaN on all without a residual, got {results}")
